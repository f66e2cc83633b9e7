"""Edits of this project's source, one per row of the cache table."""

LOSS = "nemo_rl_core/algorithms/{}/loss.py"
COMMENT = "\n# A remark about nothing.\n"
CODE = "\nANOTHER_CONSTANT = 1\n"
EDITS: dict[str, tuple[list[str], str, str]] = {
    "a comment elsewhere": ([LOSS.format("ppo")], "", COMMENT),
    "a comment in each stage's source": ([], "", COMMENT),
    "a docstring of the GRPO loss": ([LOSS.format("grpo")], '"""', '"""Reworded. '),
    "the GRPO loss": ([LOSS.format("grpo")], "", CODE),
    "the DPO loss": ([LOSS.format("dpo")], "", CODE),
    "the SFT loss": ([LOSS.format("sft")], "", CODE),
    "an environment's source": (["nemo_rl_core/environments/rewards/exact.py"], "", CODE),
    "the checker of code, which is read as text": (
        ["nemo_rl_core/environments/rewards/code_checker/checker.py"],
        "",
        CODE,
    ),
    "the sandbox's launcher, which is started": (
        ["nemo_rl_core/environments/sandbox/launcher.py"],
        "",
        CODE,
    ),
    "the engine's source": (["nemo_rl_core/backends/generation/vllm.py"], "", CODE),
    "the program that checks mathematics": (
        ["nemo_rl_core/environments/rewards/math_worker.py"],
        "",
        CODE,
    ),
    "sampling from reasoning-gym": (
        ["nemo_rl_core/data/datasets/reasoning_gym_draw.py"],
        "",
        CODE,
    ),
    "the cost that packing balances": (["nemo_rl_core/telemetry/model_flops.py"], "", CODE),
    "how errors are written": (["nemo_rl_core/errors.py"], "  {word}: {text}", "- {word}: {text}"),
    "the wording of an error": (
        ["nemo_rl_core/backends/generation/incoming.py"],
        "raise ConsistencyError(",
        'raise ConsistencyError("This is wrong. "',
    ),
    "a line of the log": (
        ["nemo_rl_core/models/generation/engine.py"],
        "; the engine is started again",
        ", so the engine restarts",
    ),
    "the label of a wait": (
        ["nemo_rl_core/models/generation/engine.py"],
        "loading weights into the engine",
        "transferring weights",
    ),
    "how a deck looks": (["nemo_rl_core/telemetry/curves.py"], "", CODE),
    "which curves a stage shows": (["tasks/train_sft.py"], '"grad_norm"', '"num_tokens"'),
    "how costs are counted": (
        [f"nemo_rl_core/telemetry/{name}.py" for name in ("cost", "usage", "budget")],
        "",
        CODE,
    ),
    "the display and the log": (
        [f"nemo_rl_core/telemetry/{name}.py" for name in ("events", "display", "waiting")],
        "",
        CODE,
    ),
    "how stages are wrapped": (
        ["tasks/stage/stage.py", "tasks/ray_cluster/ray_stage.py", "nemo_rl_core/produce.py"],
        "",
        CODE,
    ),
    "manifests and locks": (
        [f"nemo_rl_core/store/{name}.py" for name in ("manifest", "locks", "machine", "git")],
        "",
        CODE,
    ),
    "another default of SFT": (
        ["nemo_rl_core/algorithms/sft/config.py"],
        "global_batch_size: PositiveInt = 128",
        "global_batch_size: PositiveInt = 64",
    ),
    "the numerics version of train_sft": (
        ["tasks/train_sft.py"],
        "NUMERICS_VERSION = 1",
        "NUMERICS_VERSION = 2",
    ),
}
"""Files, the text to replace in each (empty to append), and its replacement."""
