"""Recipes that cannot run are refused before anything starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config import training as training_config
from nemo_rl_core.distributed import resources
from nemo_rl_core.errors import ConfigError, DataError, ModelError, NemoRLError, ResourceError
from tasks.local_run.preflight import preflight
from tasks.planning.recipe_checks import refuse_heads
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.convert import ConvertRecipe
from tasks.recipes.distillation import DistillationRecipe
from tasks.recipes.evaluate import EvaluateRecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe
from tasks.recipes.reward_model import RewardModelRecipe

pytestmark = pytest.mark.usefixtures("on_this_machine")
SUMS = {"task": "arithmetic", "environment": {"kind": "exact"}}
GAME = {"task": "guess_number", "environment": {"kind": "guess_number"}}


def check(**recipe: object) -> None:
    preflight({"config": PipelineRecipe.model_validate(recipe)})


@pytest.mark.parametrize(
    ("data", "tasks"),
    [
        ({"kind": "arithmetic", "num_train": 8, "num_validation": 2}, [SUMS, GAME]),
        ({"kind": "guess_number", "num_train": 8, "num_validation": 2}, [GAME]),
    ],
)
def test_data_whose_tasks_all_have_an_environment_passes(data: dict, tasks: list) -> None:
    check(data=data, environment={"kind": "by_task", "tasks": tasks})


def test_float8_without_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_config, "find_spec", lambda _: None)
    check()
    with pytest.raises(ResourceError, match="pip install --no-deps torchao"):
        check(training={"float8": "tensorwise"})


def test_quantized_weights_and_moments_without_bitsandbytes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantized = {"weights": "4bit", "lora": {}}
    check(training=quantized)
    with pytest.raises(ConfigError, match=r"cannot be sharded over ranks(.|\n)*num_workers to 1"):
        check(training=quantized, cluster={"num_workers": 2})
    monkeypatch.setattr(training_config, "find_spec", lambda _: None)
    with pytest.raises(ResourceError, match=r"weights: 4bit needs the package bitsandbytes"):
        check(training=quantized)
    with pytest.raises(ResourceError, match=r"sft.moments: 8bit needs the package bitsandbytes"):
        preflight({"config": GRPORecipe.model_validate({"sft": {"moments": "8bit"}})})


def test_heads_that_ranks_cannot_divide_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="cannot divide num_attention_heads"):
        check(
            model={"name": str(tiny_model)},
            training={"tensor_parallel_size": 3},
            cluster={"num_workers": 3},
        )


@pytest.mark.parametrize(
    ("changes", "training", "message"),
    [
        ({}, {"pipeline_parallel_size": 3}, "layers cannot be divided by the pipeline"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {}, "rope_type=dynamic"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, {}, "sliding_attention"),
        ({"is_causal": False}, {}, "remove is_causal"),
    ],
)
def test_models_that_megatron_cannot_hold_are_refused(
    changes: dict, training: dict, message: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(NemoRLError, match=message):
        check(
            model={"name": str(folder)},
            training={"backend": "megatron", **training},
            cluster={"num_workers": training.get("pipeline_parallel_size", 1)},
        )


def test_targets_that_match_nothing_are_refused_for_a_model_that_is_not_made_yet() -> None:
    lora = {"target_modules": ["q_proj", "v_proj"]}
    check(training={"lora": lora})
    with pytest.raises(ConfigError, match="does not have or cannot train") as refused:
        check(training={"lora": {"target_modules": ["q_proj", "v_prj"]}})
    assert refused.value.got == "v_prj"


OF_ITS_OWN = {
    "kind": "weighted_sum",
    "parts": [
        {
            "environment": {
                "kind": "llm_judge",
                "judge": {"kind": "model", "model": "folder", "placement": {"own": 2}},
            }
        },
        {"environment": {"kind": "reward_model", "model": "folder", "placement": {"own": 1}}},
    ],
}
AT = "environment.parts.0.environment.judge.placement"


@pytest.mark.parametrize(
    ("has", "fix"),
    [
        (8, f"set {AT}.own to 1, or"),
        (7, f"leave {AT} out, or"),
        (6, f"leave {AT} and environment.parts.1.environment.placement out, or"),
        (5, "set cluster.num_workers to 1, or"),
        (0, "set `cluster: {shape: laptop}`"),
    ],
)
def test_gpus_of_models_that_score_are_among_those_of_the_machine(
    has: int, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "count_gpus", lambda: has)
    with pytest.raises(ResourceError, match="smaller than the requested cluster") as refused:
        check(
            cluster={"shape": "cluster", "num_workers": 5},
            generation={"placement": {"own": 1}},
            environment=OF_ITS_OWN,
            evaluation={"environment": {"kind": "exact"}},
        )
    assert refused.value.expected == "9 GPUs"
    assert refused.value.got.startswith(f"{has} GPUs")
    assert refused.value.fix.startswith(fix)


def test_fewer_gpus_of_a_judge_are_complete_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "count_gpus", lambda: 5)
    model = {"kind": "model", "model": "folder", "tensor_parallel_size": 2}
    with pytest.raises(ResourceError) as refused:
        check(
            cluster={"shape": "cluster", "num_workers": 2},
            environment={"kind": "llm_judge", "judge": {**model, "placement": {"own": 4}}},
            evaluation={"environment": {"kind": "exact"}},
        )
    assert refused.value.fix.startswith("set environment.judge.placement.own to 2, or")


@pytest.mark.parametrize(
    ("training", "fix"),
    [
        ({}, "set cluster.num_workers to 7, or"),
        ({"tensor_parallel_size": 2}, "set cluster.num_workers to 6, or"),
        (
            {"tensor_parallel_size": 2, "data_parallel_replicas": 2},
            "set cluster.num_workers to 4, or",
        ),
        ({"tensor_parallel_size": 8}, "set `cluster: {shape: laptop}`"),
        (
            {"backend": "megatron", "pipeline_parallel_size": 2, "expert_parallel_size": 2},
            "set cluster.num_workers to 4, or",
        ),
    ],
)
def test_fewer_training_gpus_hold_complete_copies(
    training: dict[str, Any], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "count_gpus", lambda: 9)
    with pytest.raises(ResourceError) as refused:
        check(
            cluster={"shape": "cluster", "num_workers": 8},
            generation={"placement": {"own": 2}},
            training=training,
        )
    assert refused.value.fix.startswith(fix)


def test_a_missing_file_of_a_mixture_is_refused(tmp_path: Path) -> None:
    existing, missing = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    existing.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    sources = [{"data": {"kind": "file", "train": str(path)}} for path in (existing, missing)]
    with pytest.raises(DataError, match="a data file does not exist") as refused:
        check(data={"kind": "mixture", "sources": sources, "max_prompt_tokens": 16})
    assert f"data.sources.1.data.train: no file {missing}" in refused.value.problem


def test_a_task_without_an_environment_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "task": "arithmetic"} for n in range(4)]
    rows[3]["task"] = "poems"
    for name, part in (("train", rows), ("validation", rows[:1])):
        lines = "\n".join(json.dumps(row) for row in part)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    data = {
        "kind": "file",
        "train": str(tmp_path / "train.jsonl"),
        "validation": str(tmp_path / "validation.jsonl"),
        "max_prompt_tokens": 16,
    }
    environment = {"kind": "by_task", "tasks": [SUMS]}
    with pytest.raises(ConfigError, match="tasks that no environment scores") as refused:
        check(data=data, environment=environment)
    assert (refused.value.expected, refused.value.got) == ("only arithmetic", "poems")


def file_data(folder: Path, rows: list) -> dict:
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    names = {name: str(folder / f"{name}.jsonl") for name in ("train", "validation")}
    return {"kind": "file", "max_prompt_tokens": 16, **names}


def test_a_reward_without_its_columns_is_refused_with_the_existing_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_column_rewards.py").write_text(
        "def reward(completion, answer, level): return float(completion == answer) * level\n"
    )
    rows = [
        {"prompt": f"{n}=", "answer": str(n), "metadata": {"level": n, "lvl": 1}} for n in (1, 2)
    ]
    environment = {"kind": "function", "target": "my_column_rewards:reward"}
    measure = {"environment": {"kind": "exact"}}
    check(data=file_data(tmp_path, rows), environment=environment, evaluation=measure)
    del rows[1]["metadata"]["level"]
    with pytest.raises(DataError, match="train data set lacks the column level") as refused:
        check(data=file_data(tmp_path, rows), environment=environment, evaluation=measure)
    assert "missing from 1 of 2 rows: 1" in refused.value.got
    assert "answer, task, id, metadata, lvl" in refused.value.got


def test_prompts_pass_if_the_reward_needs_no_answer(tmp_path: Path) -> None:
    data = file_data(tmp_path, [{"prompt": "1+1="}, {"prompt": "2+2="}])
    regex = {"kind": "regex", "pattern": "[0-9]+"}
    check(data=data, environment=regex)
    part = {"environment": {"kind": "exact"}}
    both = {"kind": "weighted_sum", "parts": [{"environment": regex}, part]}
    for needy in ({"kind": "math"}, {"kind": "multiple_choice"}, {"kind": "tools"}, both):
        with pytest.raises(DataError, match="lacks the column answer"):
            check(data=data, environment=needy, evaluation={"environment": regex})


@pytest.mark.slow
def test_reference_answers_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "answer": r"\$4"}, {"prompt": "Prove it.", "answer": "?"}]
    for kind, count in (("math", 1), ("multiple_choice", 2)):
        with pytest.raises(DataError, match=f"{count} of 2 rows of the train data set"):
            check(data=file_data(tmp_path, rows), environment={"kind": kind})
    check(data=file_data(tmp_path, rows[:1]), environment={"kind": "math"})


def test_a_custom_environment_is_checked_before_a_run() -> None:
    section = {"kind": "python", "target": "no_module_of_mine:Env"}
    for each in (
        section,
        {"kind": "by_task", "tasks": [{"task": "arithmetic", "environment": section}]},
    ):
        with pytest.raises(ConfigError, match="'no_module_of_mine:Env' cannot be imported"):
            check(environment=each)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"kind": "regex", "pattern": "("}, "not a valid regular expression"),
        ({"kind": "json_schema", "json_schema": "{]"}, "not a valid JSON Schema"),
        (
            {
                "kind": "llm_judge",
                "judge": {
                    "kind": "endpoint",
                    "url": "http://127.0.0.1:9/v1",
                    "model": "m",
                    "api_key_variable": "NO_SUCH_KEY_IS_SET",
                },
            },
            "key is missing",
        ),
    ],
)
def test_unusable_rewards_are_refused_within_tasks_too(environment: dict, words: str) -> None:
    tasks = [{"task": "arithmetic", "environment": environment}]
    for each in (environment, {"kind": "by_task", "tasks": tasks}):
        with pytest.raises(ConfigError, match=words):
            check(environment=each)


def test_scores_without_a_verdict_are_not_an_evaluation() -> None:
    weighted = {"kind": "weighted_sum", "parts": [{"environment": {"kind": "exact"}}]}
    tasks = [{"task": "arithmetic", "environment": weighted}]
    with pytest.raises(ConfigError, match="'weighted_sum' gives scores"):
        check(environment={"kind": "by_task", "tasks": tasks})


CONTEXT = {"model": {"kind": "from_config", "max_position_embeddings": 24}}
PROMPTS = {"kind": "arithmetic", "num_train": 8, "num_validation": 2, "max_prompt_tokens": 16}


def test_samples_of_the_evaluation_must_fit_the_context() -> None:
    check(**CONTEXT, data=PROMPTS, evaluation={"generation": {"max_new_tokens": 8}})
    with pytest.raises(ConfigError, match="longer than the model's context") as refused:
        check(**CONTEXT, data=PROMPTS, evaluation={"generation": {"max_new_tokens": 9}})
    assert refused.value.expected is not None
    assert "data.max_prompt_tokens + evaluation.generation.max_new_tokens" in refused.value.expected
    assert refused.value.got == "16 + 9"
    longer = {**PROMPTS, "max_prompt_tokens": 17}
    with pytest.raises(ConfigError, match="longer than the model's context") as refused:
        check(**CONTEXT, data=PROMPTS, evaluation={"data": longer})
    assert refused.value.got == "17 + 8"


@pytest.mark.parametrize("section", ["generation", "evaluation"])
def test_engines_that_do_not_fit_the_cluster_are_refused(section: str) -> None:
    two = {"num_engines": 2}
    recipe = {section: two if section == "generation" else {"generation": two}}
    check(**recipe, cluster={"num_workers": 2})
    with pytest.raises(ConfigError, match="2 engines of 1 workers do not fit") as refused:
        check(**recipe)
    assert (refused.value.expected, refused.value.got) == (
        "at most 1 workers (cluster.num_workers)",
        "2",
    )


def test_a_length_penalty_is_compared_with_all_turns_of_a_rollout() -> None:
    recipe = {
        "grpo": {"overlong": {"buffer_tokens": 20}},
        "generation": {"max_new_tokens": 8},
    }
    preflight({"config": GRPORecipe(**recipe, rollouts={"max_rollout_tokens": 40})})
    with pytest.raises(ConfigError, match="20") as refused:
        preflight({"config": GRPORecipe(**recipe)})
    assert "(8)" in refused.value.problem
    with pytest.raises(ConfigError, match=r"\(19\)"):
        preflight({"config": GRPORecipe(**recipe, rollouts={"max_rollout_tokens": 19})})


WHEEL = {"kind": "wheel", "name": "small", "package": "no-such-package==1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"tasks": ["chain_summ"]}, "reasoning-gym has no task"),
        ({"task_options": {"chain_sum": {"min_terms": 3, "max_terms": 2}}}, "refuses its options"),
    ],
)
def test_generated_rows_are_checked_before_a_model_is_downloaded(data: dict, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        check(
            model=WHEEL,
            data={"kind": "reasoning_gym", "num_train": 4, "num_validation": 2, **data},
            environment={"kind": "reasoning_gym"},
        )


def test_a_base_model_is_measured_only_before_a_supervised_start() -> None:
    words = {"recipe": "grpo_arithmetic", "measure_base": True}
    preflight({"config": GRPORecipe.model_validate(words)})
    with pytest.raises(ConfigError, match="measure_base") as refused:
        preflight({"config": GRPORecipe.model_validate({**words, "sft": None})})
    assert refused.value.expected == "a section sft, or measure_base: false"


NARROW = {"kind": "from_config", "hidden_size": 64, "num_heads": 4}
WIDE = {"kind": "from_config", "hidden_size": 128, "num_heads": 4}
HF = {"backend": "hf", "max_new_tokens": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "fix"),
    [
        ({}, "set generation.backend to hf, or"),
        ({"evaluation": {"generation": HF}}, "set generation.backend to hf, or"),
        (
            {"evaluation": {"generation": {"backend": "vllm"}}},
            "set generation.backend and evaluation.generation.backend to hf, or",
        ),
        (
            {"generation": HF, "evaluation": {"generation": {"backend": "vllm"}}},
            "set evaluation.generation.backend to hf, or",
        ),
    ],
)
def test_heads_that_vllm_does_not_compute_are_refused_before_training(
    sections: dict, fix: str
) -> None:
    with pytest.raises(ModelError, match="cannot sample from the model 'qwen2-tiny'") as refused:
        check(model=NARROW, **sections)
    assert refused.value.got.startswith("head_dim 16")
    assert refused.value.fix.startswith(fix)
    check(model=WIDE, **sections)
    check(model=NARROW, generation=HF)


@pytest.mark.slow
def test_heads_of_a_folder_and_of_a_judge_are_checked(tiny_model: Path) -> None:
    section = {"kind": "pretrained", "name": str(tiny_model)}  # two heads share a width of 32
    with pytest.raises(ModelError, match="cannot sample from the model '/"):
        check(model=section)
    check(model=section, generation=HF)
    judge = {"kind": "llm_judge", "judge": {"kind": "model", "model": str(tiny_model)}}
    with pytest.raises(ModelError, match="cannot sample from the judge") as refused:
        check(environment=judge, evaluation={"environment": {"kind": "exact"}})
    assert "backend" not in refused.value.fix


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        ("gpt_oss", "cluster", "new weights"),
        ("mamba", "laptop", "state-space"),
        ("mamba", "cluster", None),
        ("bart", "cluster", "no class"),
        ("minimax", "laptop", "no class"),
    ],
)
def test_types_that_vllm_does_not_compute_are_refused_before_training(
    kind: str, shape: str, reason: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    values = {"model": {"name": str(tmp_path)}, "cluster": {"shape": shape}}
    recipe = GRPORecipe.model_validate(values)
    if kind == "gpt_oss":
        refuse_heads(EvaluateRecipe.model_validate(values))  # no new weights
    if reason is None:
        refuse_heads(recipe)
        return
    with pytest.raises(ModelError) as refused:
        refuse_heads(recipe)
    assert refused.value.got.startswith(f"model_type {kind}: vLLM ")
    assert reason in refused.value.got
    assert refused.value.fix == "set generation.backend to hf"


def test_heads_of_a_teacher_are_not_checked() -> None:
    teacher = {"model": NARROW}
    recipe = DistillationRecipe.model_validate({"model": WIDE, "teacher": teacher})
    preflight({"config": recipe})


def test_heads_are_not_checked_without_sampling(tmp_path: Path) -> None:
    preflight({"config": ConvertRecipe.model_validate({"model": NARROW})})
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    data = {"kind": "file", "train": str(rows), "validation": str(rows)}
    values = {"model": NARROW, "pairs": {"kind": "data"}, "data": data}
    assert RewardModelRecipe.model_validate(values).sampled_models == []
    assert RewardModelRecipe.model_validate({"model": NARROW}).sampled_models != []


def test_on_gpus_heads_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "count_gpus", lambda: 1)
    check(model=NARROW, cluster={"shape": "one_gpu"})


def test_all_missing_files_are_named_with_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as refused:
        check(
            model={"kind": "pretrained", "name": "./nomodel"},
            data={"kind": "file", "train": "no.jsonl", "validation": "none.jsonl"},
            environment={"kind": "python", "target": "no_rewards_here:near"},
        )
    lines = refused.value.problem.splitlines()
    assert lines[1:4] == [
        f"  data.train: no file {tmp_path / 'no.jsonl'}",
        f"  data.validation: no file {tmp_path / 'none.jsonl'}",
        f"  model.name: no folder {tmp_path / 'nomodel'}",
    ]
    assert lines[4].startswith("  environment: ")
    assert "no_rewards_here" in lines[4]
    assert (
        refused.value.fix
        == "correct data.train, data.validation, model.name, environment in the recipe"
    )


def test_a_missing_reward_of_a_later_stage_is_named_with_other_mistakes() -> None:
    missing = {"kind": "function", "target": "no_rewards_here:near"}
    data = {"kind": "file", "train": "no.jsonl"}
    values = {"environment": missing, "grpo_reward": missing, "data": data}
    recipe = PostTrainRecipe.model_validate(values)
    with pytest.raises(NemoRLError) as refused:
        preflight({"config": recipe})
    assert "environment: " in refused.value.problem
    assert "grpo_reward: " in refused.value.problem
