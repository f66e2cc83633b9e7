"""Settings of sampling: kinds of engines, and combinations that are refused."""

import ast
import re
from inspect import getsource
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from nemo_rl_core.algorithms.distillation.config import DistillationSettings
from nemo_rl_core.algorithms.distillation.trainer import DistillationTrainer
from nemo_rl_core.algorithms.grpo.asynchronous import AsyncGRPOTrainer
from nemo_rl_core.algorithms.grpo.config import GRPOSettings
from nemo_rl_core.algorithms.grpo.trainer import GRPOTrainer
from nemo_rl_core.algorithms.ppo.config import PPOSettings
from nemo_rl_core.algorithms.ppo.trainer import PPOTrainer
from nemo_rl_core.backends.generation import vllm
from nemo_rl_core.config.engine_options import OWNED, vllm_options
from nemo_rl_core.config.generation import (
    GenerationConfig,
    HuggingFaceGenerationConfig,
    MegatronGenerationConfig,
    VllmGenerationConfig,
)
from nemo_rl_core.errors import ConfigError
from tasks.recipes.distillation import DistillationRecipe
from tasks.recipes.dpo import DPORecipe
from tasks.recipes.evaluate import EvaluateRecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe
from tasks.recipes.ppo import PPORecipe
from tasks.recipes.reward_model import RewardModelRecipe

RESHAPED: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 5},
    {"repetition_penalty": 1.1},
    {"backend": "hf", "temperature": 0.7, "top_p": 0.9, "top_k": 5},
]
UNFIT: list[dict[str, Any]] = [{"temperature": 0}, *RESHAPED]


def read(values: dict[str, Any]) -> Any:
    return TypeAdapter(GenerationConfig).validate_python(values)


def test_backend_key_determines_the_config() -> None:
    assert read({"max_new_tokens": 5}) == VllmGenerationConfig(max_new_tokens=5)
    assert read({"backend": "hf", "top_k": 4}) == HuggingFaceGenerationConfig(top_k=4)
    split = read({"backend": "megatron", "tensor_parallel_size": 2, "pipeline_parallel_size": 3})
    assert split.ranks_per_engine == 6
    assert isinstance(split, MegatronGenerationConfig)
    with pytest.raises(ConfigError, match="unknown key 'kv_cache_gib'"):
        read({"backend": "hf", "kv_cache_gib": 2})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1}, "greater than or equal to 0"),
        ({"temperature": 0.001}, "at least 0.01"),
        ({"top_p": 0}, "greater than 0"),
        ({"top_p": 1.1}, "less than or equal to 1"),
        ({"top_k": 0}, "greater than 0"),
        ({"repetition_penalty": 0}, "greater than 0"),
        ({"stop_strings": [""]}, "at least 1 character"),
        ({"generate_timeout_seconds": 0}, "greater than 0"),
        ({"skip_tokenizer_init": True, "stop_strings": ["x"]}, "remove one of them"),
        ({"backend": "vlm"}, "vlm"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        read(values)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "half", "seed": 1}, "dtype: set model.dtype; seed: set seed"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode: remove it"),
        ({"speculativ_config": {}}, "did you mean 'speculative_config'?"),
        ({"no_such_option": 1}, "see `vllm serve"),
    ],
)
def test_engine_options_of_the_project_and_unknown_ones_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read({"engine_options": options})


def test_every_option_that_is_passed_or_refused_is_one_of_vllms() -> None:
    assert vllm_options() >= OWNED.keys()
    passed = {
        each.arg for each in ast.walk(ast.parse(getsource(vllm))) if isinstance(each, ast.keyword)
    }
    assert (passed & vllm_options()) - OWNED.keys() == set()


def test_engine_options_change_the_config_only_where_they_are_given() -> None:
    assert "engine_options" not in read({}).model_dump()
    assert read({"engine_options": {"kv_cache_dtype": "fp8"}}).model_dump()["engine_options"]


@pytest.mark.parametrize("generation", UNFIT)
@pytest.mark.parametrize("settings", [GRPOSettings, PPOSettings, DistillationSettings])
def test_training_samples_what_the_trainer_can_score(settings: Any, generation: dict) -> None:
    with pytest.raises(ConfigError, match="rollouts for training") as caught:
        settings(generation=generation)
    reshaping = [f"{k}: {v}" for k, v in generation.items() if k not in ("backend", "temperature")]
    assert ", ".join(reshaping) in str(caught.value)
    assert settings(generation={"temperature": 0.7, "stop_strings": ["x"]})


@pytest.mark.parametrize("generation", UNFIT)
@pytest.mark.parametrize("experiment", [GRPORecipe, PPORecipe, DistillationRecipe])
def test_pipeline_warns_before_it_starts(experiment: Any, generation: dict) -> None:
    experiment().refuse_contradictions()
    with pytest.raises(ConfigError, match="rollouts for training"):
        experiment(generation=generation).refuse_contradictions()


@pytest.mark.parametrize("generation", RESHAPED)
def test_evaluation_and_pairs_may_sample_from_another_distribution(generation: dict) -> None:
    for experiment in (GRPORecipe, PPORecipe, DistillationRecipe, PostTrainRecipe):
        experiment(evaluation={"generation": generation}).refuse_contradictions()
    for experiment in (DPORecipe, RewardModelRecipe, EvaluateRecipe):
        experiment(generation=generation).refuse_contradictions()
    with pytest.raises(ConfigError, match="rollouts for training"):
        PostTrainRecipe(generation=generation).refuse_contradictions()


@pytest.mark.parametrize(
    "trainer", [GRPOTrainer, AsyncGRPOTrainer, PPOTrainer, DistillationTrainer]
)
def test_python_trainers_refuse_it_before_loading_a_model(trainer: Any) -> None:
    with pytest.raises(ConfigError, match="must be sampled from all tokens"):
        trainer(model="no/model", top_p=0.9)
    with pytest.raises(ConfigError, match="here it is left out: training samples from the pol"):
        trainer(model="no/model", min_p=0.1)
