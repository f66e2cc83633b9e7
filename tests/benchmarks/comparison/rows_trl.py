"""Rows that compare with TRL: the same model, rows, optimizer and threads."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.benchmarks.comparison import project_sides, trl_sides
from tests.benchmarks.comparison.command import Spent, spent_by
from tests.benchmarks.comparison.inputs import (
    LEARNING_RATE,
    NUM_THREADS,
    examples,
    model_folder,
    pairs,
    prompts,
    saved,
)
from tests.benchmarks.comparison.measured import Bench, Measured, Row, compared, require_equal
from tests.benchmarks.comparison.turns import Side, Turn, take_turns

BATCH = 8
GROUP = 8
MAX_NEW_TOKENS = 48
SECOND_RUN_PAIRS, SECOND_RUN_STEPS = 256, 64


def dpo_step(bench: Bench) -> Measured:
    """Compares full steps of 8 pairs with cached reference logprobs."""
    model, rows, steps = model_folder(bench.scratch), pairs(BATCH), 4
    train = saved(rows, model, bench.folder("pairs"))
    common = {"model": model, "steps": steps}
    sides = {
        "ours": Side(
            project_sides.dpo,
            {**common, "train": train, "work": bench.folder("run"), "batch": BATCH},
        ),
        "TRL": Side(trl_sides.dpo, {**common, "rows": rows, "work": bench.folder("run")}),
    }
    turns = take_turns(sides, num_turns=bench.n, logs=bench.logs)
    require_equal("loss", turns, within=1e-3)
    require_equal("tokens", turns, within=0)
    return compared(turns["ours"], turns["TRL"], note=f"{steps} steps per turn, prefixes shared")


def sft(bench: Bench) -> Measured:
    """Compares full steps of 8 examples, TRL padding-free."""
    model, rows, steps = model_folder(bench.scratch), examples(BATCH), 4
    train = saved(rows, model, bench.folder("examples"))
    common = {"model": model, "steps": steps}
    sides = {
        "ours": Side(
            project_sides.sft,
            {**common, "train": train, "work": bench.folder("run"), "batch": BATCH},
        ),
        "TRL": Side(trl_sides.sft, {**common, "rows": rows, "work": bench.folder("run")}),
    }
    turns = take_turns(sides, num_turns=bench.n, logs=bench.logs)
    require_equal("loss", turns, within=1e-3)
    return compared(turns["ours"], turns["TRL"], note=f"{steps} steps per turn")


def _grpo_settings(generation: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": GROUP,
        "loss": {"kl": None},
        "generation": {"max_new_tokens": MAX_NEW_TOKENS, **generation},
        "training": {"share_prefixes": True},
    }


def grpo_step(bench: Bench) -> Measured:
    """Compares steps on recorded rollouts: everything except generation."""
    model, rows = model_folder(bench.scratch), prompts(2, 136)
    train = saved(rows, model, bench.folder("prompts"))
    # One turn records the rollouts that both sides use.
    recording = bench.folder("run")
    common = {"model": model, "train": train, "steps": 1, "scorer": project_sides.as_reward()}
    record = Side(
        project_sides.grpo,
        {
            **common,
            "settings": _grpo_settings({"backend": "hf"}),
            "work": recording,
            "steps": bench.n + 1,
        },
    )
    take_turns({"record": record}, num_turns=1, num_warm=0, logs=bench.logs)
    replay = recording / "rollouts"
    sides = {
        "ours": Side(
            project_sides.grpo,
            {
                **common,
                "settings": _grpo_settings({}),
                "work": bench.folder("run"),
                "replay": replay,
            },
        ),
        "TRL": Side(trl_sides.grpo, {**_trl_grpo(bench, model, rows), "replay": replay}),
    }
    turns = take_turns(sides, num_turns=bench.n, logs=bench.logs)
    require_equal("loss", turns, within=1e-3)
    for mine, other in zip(turns["ours"], turns["TRL"], strict=True):
        require_equal("tokens", {"ours": [mine], "TRL": [other]}, within=0)
    return compared(turns["ours"], turns["TRL"])


def grpo_whole(bench: Bench) -> Measured:
    """Compares full steps, ours with vLLM, TRL's with transformers."""
    model, rows = model_folder(bench.scratch), prompts(2, 136)
    train = saved(rows, model, bench.folder("prompts"))
    ours = {
        "model": model,
        "train": train,
        "steps": 1,
        "scorer": project_sides.as_reward(),
        "settings": _grpo_settings({}),
        "work": bench.folder("run"),
    }
    sides = {
        "ours": Side(project_sides.grpo, ours),
        "TRL": Side(trl_sides.grpo, _trl_grpo(bench, model, rows)),
    }
    turns = take_turns(sides, num_turns=bench.n, logs=bench.logs)
    note = "TRL generates with transformers: its way without a GPU and a server"
    return compared(turns["ours"], turns["TRL"], per="tokens", note=note)


def _trl_grpo(bench: Bench, model: Path, rows: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "model": model,
        "rows": rows,
        "work": bench.folder("run"),
        "group": GROUP,
        "max_new_tokens": MAX_NEW_TOKENS,
    }


def dpo_second_run(bench: Bench) -> Measured:
    """Compares complete commands, the second with another learning rate."""
    model = model_folder(bench.scratch)
    rows = pairs(SECOND_RUN_PAIRS)
    folder, store = bench.folder("second"), bench.folder("store")
    train = _written(rows, folder / "pairs.jsonl")
    validation = _written(pairs(BATCH, seed=1), folder / "validation.jsonl")
    questions = _written(prompts(2 * BATCH, 120, seed=2), folder / "questions.jsonl")
    script = Path(trl_sides.__file__).with_name("trl_dpo.py")

    def ours(rate: float) -> Spent:
        recipe = _second_recipe(model, train, validation, questions) | _rate(rate)
        command = [_program("pyflyte"), "run", "workflows/dpo.py", "dpo", "--config"]
        return spent_by([*command, json.dumps(recipe)], {"NEMO_RL_HOME": str(store)}, bench.logs)

    def theirs(rate: float) -> Spent:
        arguments = [str(model), str(train), str(SECOND_RUN_STEPS), str(BATCH), str(rate)]
        return spent_by([sys.executable, str(script), *arguments], {}, bench.logs)

    ours(LEARNING_RATE)
    n = max(2, bench.n // 5)
    turns: dict[str, list[Turn]] = {"ours": [], "TRL": []}
    for round_ in range(n):
        rate = LEARNING_RATE * (2 + round_)
        for name, run in (("ours", ours), ("TRL", theirs)):
            spent = run(rate)
            turns[name].append(Turn(spent.wall, spent.cpu, {}))
    note = f"{SECOND_RUN_PAIRS} pairs, {SECOND_RUN_STEPS} steps of {BATCH}"
    return compared(turns["ours"], turns["TRL"], note=note)


def _written(rows: list[dict[str, str]], file: Path) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _rate(learning_rate: float) -> dict[str, Any]:
    section = {
        "num_iterations": 1,
        "num_steps_per_iteration": SECOND_RUN_STEPS,
        "num_pairs_per_step": BATCH,
        "learning_rate": learning_rate,
        "save_every_num_steps": SECOND_RUN_STEPS,
        "loss": {"kind": "sigmoid"},
    }
    return {"dpo": section}


def _second_recipe(model: Path, train: Path, validation: Path, questions: Path) -> dict[str, Any]:
    """Returns a pipeline with as little besides training as possible: TRL has no evaluation."""
    return {
        "model": {"kind": "pretrained", "name": str(model)},
        "data": {"kind": "file", "train": str(train), "validation": str(validation)},
        "sft": None,
        "pairs": {"kind": "data"},
        "cluster": {"num_threads": NUM_THREADS},
        "generation": {"backend": "hf", "max_new_tokens": 2},
        "evaluation": {
            "num_samples_per_prompt": 1,
            "data": {"kind": "file", "train": str(questions), "validation_fraction": 0.5},
        },
    }


@cache
def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


ROWS = [
    Row("dpo_step", "DPO step, cached references, against TRL", "≥ 12 times", dpo_step),
    Row(
        "dpo_second_run",
        "second DPO run, another learning rate, full command, against TRL",
        "≥ 8 times",
        dpo_second_run,
    ),
    Row("sft", "SFT step against TRL padding-free", "≥ 4.3 times", sft),
    Row("grpo_step", "GRPO step without generation against TRL", "≥ 9 times", grpo_step),
    Row("grpo_whole", "full GRPO step per token against TRL", "≥ 5 times", grpo_whole),
]
