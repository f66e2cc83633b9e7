"""Recipes of pretrained models get defaults for such models; checked-in recipes keep theirs."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.local_run import preflight
from tasks.recipes import common
from tasks.recipes.evaluate import EvaluateRecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe
from tests.unit.config.test_config import RECIPES, experiment_of


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_checked_in_recipes_get_no_defaults(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[dict[str, Any]] = []
    monkeypatch.setattr(common, "_log_choices", results.append)
    experiment_of(path).model_validate(yaml.safe_load(path.read_text()))
    assert not any(results)


def recipe(**sections: Any) -> GRPORecipe:
    return GRPORecipe.model_validate({"model": {"name": "org/model"}, **sections})


def test_a_pretrained_model_gets_rates_lengths_and_a_type() -> None:
    validated = recipe(cluster={"shape": "one_gpu"}, sft={"num_steps": 3})
    assert (validated.grpo.learning_rate, validated.grpo.num_warmup_steps) == (1e-6, 10)
    assert validated.sft is not None
    assert validated.sft.learning_rate == 2e-5
    assert validated.generation.max_new_tokens == 512
    assert validated.model.dtype == "bfloat16"
    # A stage reads the completed recipe again, in which no default is missing.
    assert GRPORecipe.model_validate_json(validated.model_dump_json()) == validated


def test_settings_of_a_recipe_are_kept() -> None:
    validated = recipe(
        model={"name": "org/model", "dtype": "float32"},
        cluster={"shape": "one_gpu"},
        grpo={"learning_rate": 3e-6},
        generation={"max_new_tokens": 64},
    )
    assert (validated.grpo.learning_rate, validated.grpo.num_warmup_steps) == (3e-6, 0)
    assert validated.generation.max_new_tokens == 64
    assert validated.model.dtype == "float32"
    assert validated.sft is None


def test_the_type_may_be_left_to_the_cluster() -> None:
    small = recipe(model={"kind": "from_config", "dtype": "auto"})
    assert (small.model.dtype, small.grpo.learning_rate) == ("float32", 1e-3)


@pytest.mark.parametrize(
    ("cluster", "generation", "engines"),
    [
        ({"shape": "node_8gpu"}, {}, 8),
        ({"shape": "node_8gpu"}, {"backend": "vllm", "tensor_parallel_size": 2}, 4),
        ({"shape": "cluster", "num_workers": 16}, {"tensor_parallel_size": 8}, 2),
        ({"shape": "cluster", "num_workers": 4}, {"tensor_parallel_size": 8}, 1),
        ({"shape": "node_8gpu"}, {"num_engines": 2}, 2),
        ({"shape": "cluster", "num_workers": 4}, {"placement": {"own": 2}}, 2),
        ({"shape": "one_gpu"}, {}, 1),
        ({"num_workers": 4}, {}, 1),  # on CPUs the default does not change results
    ],
)
@pytest.mark.parametrize("model", [{"name": "org/model"}, {"kind": "from_config"}])
def test_engines_fill_the_gpus_of_the_cluster(
    cluster: dict[str, Any], generation: dict[str, Any], engines: int, model: dict[str, Any]
) -> None:
    validated = recipe(model=model, cluster=cluster, generation=generation)
    assert validated.generation.num_engines == engines
    assert validated.generation.backend == "vllm"
    read_again = GRPORecipe.model_validate_json(validated.model_dump_json())
    assert read_again == validated
    sampling = {"evaluation": {"generation": {"temperature": 0.5, **generation}}}
    evaluated = recipe(model=model, cluster=cluster, **sampling).evaluation.generation
    assert evaluated is not None
    assert evaluated.num_engines == engines


@pytest.mark.parametrize(
    ("sections", "share"),
    [
        ({"generation": {"placement": {"own": 2}}}, 0.9),
        ({"generation": {"placement": {"own": 2}, "gpu_memory_utilization": 0.7}}, 0.7),
        ({"generation": {}}, 0.5),
        ({"generation": {"placement": {"own": 2}}, "cluster": {"num_workers": 4}}, 0.5),  # no GPUs
    ],
)
def test_engines_use_most_of_dedicated_gpus(sections: dict[str, Any], share: float) -> None:
    sections = {"cluster": {"shape": "cluster", "num_workers": 4}, **sections}
    validated = recipe(**sections)
    assert validated.generation.gpu_memory_utilization == share
    assert GRPORecipe.model_validate_json(validated.model_dump_json()) == validated
    of_megatron = {"generation": {"backend": "megatron", "placement": {"own": 2}}}
    assert recipe(**{**sections, **of_megatron}).generation.num_engines == 2
    evaluated = recipe(**{**sections, "evaluation": {"generation": sections["generation"]}})
    assert evaluated.evaluation.generation.gpu_memory_utilization == share


def precisions(**sections: Any) -> tuple[str, str, str]:
    validated = recipe(evaluation={"generation": {"temperature": 0.5}}, **sections)
    assert GRPORecipe.model_validate_json(validated.model_dump_json()) == validated
    parts = validated.training, validated.generation, validated.evaluation.generation
    return tuple(part.float32_matmul_precision for part in parts)


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_float32_is_computed_in_tf32_on_gpus(backend: str) -> None:
    training, cluster = {"backend": backend}, {"shape": "one_gpu"}
    full = {"model": {"name": "org/model", "dtype": "float32"}, "training": training}
    assert precisions(**full, cluster=cluster) == ("high",) * 3
    small = {"kind": "from_config"}  # float32 by default
    assert precisions(model=small, training=training, cluster=cluster) == ("high",) * 3
    # No change on CPUs, in bfloat16 and if results must be bitwise identical.
    assert precisions(**full) == ("highest",) * 3
    assert precisions(training=training, cluster=cluster) == ("highest",) * 3
    exact = {**full, "training": {**training, "deterministic": True}}
    assert precisions(**exact, cluster=cluster) == ("highest",) * 3


def test_full_float32_on_gpus_can_be_requested() -> None:
    highest = {"float32_matmul_precision": "highest"}
    result = precisions(
        model={"kind": "from_config"},
        cluster={"shape": "node_8gpu"},
        training=highest,
        generation=highest,
    )
    assert result == ("highest", "highest", "high")


def test_an_engine_of_another_kind_has_no_such_settings() -> None:
    validated = recipe(
        model={"kind": "from_config"}, cluster={"shape": "one_gpu"}, generation={"backend": "hf"}
    )
    assert validated.generation.backend == "hf"
    assert validated.training.float32_matmul_precision == "high"


def test_evaluation_gets_only_the_length() -> None:
    validated = EvaluateRecipe.model_validate({"model": {"name": "org/model"}})
    assert validated.generation.max_new_tokens == 512


def test_stages_of_a_family_each_get_their_rate() -> None:
    validated = PostTrainRecipe.model_validate(
        {"recipe": "post_train_arithmetic", "model": {"name": "org/model"}}
    )
    assert validated.reward_model.learning_rate == 1e-5
    assert validated.grpo.learning_rate == 0.0005  # from the base recipe


def test_run_warns_of_a_toy_learning_rate(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preflight, "num_parameters", lambda folder: 1.5e9)
    validated = GRPORecipe.model_validate(
        {"recipe": "grpo_arithmetic", "model": {"name": str(tiny_model)}, "sft": None}
    )
    with caplog.at_level(logging.WARNING):
        preflight._warn_of_the_rates(validated)
    assert "grpo.learning_rate 0.0005 usually destroys" in caplog.text
    assert "5e-07 to 5e-06 is the usual range" in caplog.text
