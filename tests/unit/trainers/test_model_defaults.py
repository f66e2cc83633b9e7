"""Defaults depend on the model and the machine; explicit settings are kept."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core import (
    DistillationTrainer,
    DPOTrainer,
    GRPOTrainer,
    PPOTrainer,
    RewardModelTrainer,
    SFTTrainer,
)
from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.config.defaults import DefaultsContext, defaults_of_pretrained, rate_warning
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.fit import defaults


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "count_gpus", lambda: 0)


@pytest.mark.parametrize(
    ("trainer", "rate"),
    [
        (SFTTrainer, 2e-5),
        (DPOTrainer, 5e-7),
        (RewardModelTrainer, 1e-5),
        (GRPOTrainer, 1e-6),
        (PPOTrainer, 1e-6),
        (DistillationTrainer, 2e-6),
    ],
)
def test_a_pretrained_model_gets_the_rate_of_its_algorithm(trainer: Any, rate: float) -> None:
    assert trainer.from_pretrained("org/model").config.learning_rate == rate
    assert trainer.from_pretrained("org/model").config.num_warmup_steps == 10
    lora = trainer.from_pretrained("org/model", training={"lora": {}})
    assert lora.config.learning_rate == pytest.approx(10 * rate)


def test_a_model_of_this_project_keeps_its_defaults() -> None:
    settings = GRPOTrainer.from_pretrained(ModelFromConfig()).settings
    assert (settings.grpo.learning_rate, settings.generation.max_new_tokens) == (1e-3, 8)


def test_explicit_settings_are_kept_and_chosen_ones_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = GRPOTrainer.from_pretrained("org/model", learning_rate=3e-6, temperature=0.9)
    settings = trainer.settings
    assert (settings.grpo.learning_rate, settings.grpo.num_warmup_steps) == (3e-6, 0)
    assert settings.generation.max_new_tokens == 512
    assert "chosen for the pretrained model model: dtype float32, generation.max" in caplog.text


def test_completions_fit_the_context_of_the_model(tiny_model: Path) -> None:
    context = json.loads((tiny_model / "config.json").read_text())["max_position_embeddings"]
    settings = GRPOTrainer.from_pretrained(tiny_model, max_prompt_tokens=100).settings
    assert settings.generation.max_new_tokens == min(512, context - 100)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (128, 128)),
        ({"max_new_tokens": 56}, (200, 56)),
        ({"max_prompt_tokens": 250}, (250, 6)),
        ({"max_prompt_tokens": 100, "max_new_tokens": 100}, (100, 100)),
    ],
)
def test_a_short_context_is_shared_by_prompts_and_completions(
    tiny_model: Path, given: dict[str, int], lengths: tuple[int, int]
) -> None:
    settings = GRPOTrainer.from_pretrained(tiny_model, **given).settings
    assert (settings.max_prompt_tokens, settings.generation.max_new_tokens) == lengths


@pytest.mark.parametrize("prompt", [256, 512])
def test_prompts_without_room_for_completions_are_refused(tiny_model: Path, prompt: int) -> None:
    with pytest.raises(ConfigError, match="leave no room for completions") as caught:
        GRPOTrainer.from_pretrained(tiny_model, max_prompt_tokens=prompt)
    assert "max_prompt_tokens to 128" in str(caught.value.fix)


def chosen(num_gpus: int, **values: Any) -> dict[str, Any]:
    return defaults_of_pretrained(
        values, algorithm=GRPOConfig.algorithm, samples=True, context=DefaultsContext(num_gpus)
    )


@pytest.mark.parametrize(
    ("num_gpus", "shape", "num_workers"),
    [(1, "one_gpu", 1), (4, "cluster", 4), (8, "node_8gpu", 8)],
)
def test_all_gpus_of_a_machine_are_used(num_gpus: int, shape: str, num_workers: int) -> None:
    settings = chosen(num_gpus)
    assert settings["cluster"] == {"shape": shape, "num_workers": num_workers}
    assert settings["dtype"] == "bfloat16"
    assert settings.get("generation.num_engines", 1) == num_workers


def test_only_complete_copies_of_a_split_model_are_used() -> None:
    settings = chosen(
        6, training={"tensor_parallel_size": 4}, generation={"tensor_parallel_size": 2}
    )
    assert settings["cluster"]["num_workers"] == 4
    assert settings["generation.num_engines"] == 2


def test_an_explicit_cluster_determines_the_dtype() -> None:
    assert chosen(8, cluster={"shape": "laptop"})["dtype"] == "float32"
    assert "cluster" not in chosen(8, cluster={"shape": "laptop"})
    assert "dtype" not in chosen(8, dtype="float32")


def test_a_too_large_learning_rate_for_a_pretrained_model_is_a_warning(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        SFTTrainer.from_pretrained(tiny_model, learning_rate=1e-3)  # small enough for this rate
        assert "destroys" not in caplog.text
        monkeypatch.setattr(defaults, "num_parameters", lambda folder: 1.5e9)
        SFTTrainer.from_pretrained(tiny_model, learning_rate=1e-3)
    assert "sft.learning_rate 0.001 usually destroys" in caplog.text
    assert "1e-05 to 0.0001 is the usual range" in caplog.text
    assert (
        rate_warning("sft", 1e-3, algorithm=SFTConfig.algorithm, num_parameters=1e9, uses_lora=True)
        is None
    )
    assert (
        rate_warning(
            "sft", 1e-4, algorithm=SFTConfig.algorithm, num_parameters=1e9, uses_lora=False
        )
        is None
    )
