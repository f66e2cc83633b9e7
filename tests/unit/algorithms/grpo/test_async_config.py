"""Requirements and defaults of asynchronous GRPO."""

from typing import Any

import pytest

from nemo_rl_core.algorithms import AsyncGRPOTrainer
from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.algorithms.grpo.loss_config import TruncatedImportance


def test_stale_samples_are_weighted_unless_the_loss_says_otherwise() -> None:
    assert GRPOConfig().loss.importance is None
    ahead = GRPOConfig.model_validate({"asynchronous": {}})
    assert ahead.loss.importance == TruncatedImportance()
    assert ahead.asynchronous is not None
    assert ahead.asynchronous.max_staleness == 1
    values = {"asynchronous": {}, "loss": {"clip_high": 0.3, "importance": None}}
    assert GRPOConfig.model_validate(values).loss.importance is None
    other = {"asynchronous": {}, "loss": {"clip_high": 0.3}}
    assert GRPOConfig.model_validate(other).loss.importance == TruncatedImportance()
    # A config survives serialization by Flyte.
    assert GRPOConfig.model_validate(ahead.model_dump()) == ahead


def test_settings_that_cannot_sample_ahead_are_refused() -> None:
    with pytest.raises(ValueError, match="max_staleness is 1"):
        GRPOConfig.model_validate({"asynchronous": {}, "loss": {"kind": "on_policy"}})


def test_dynamic_sampling_is_allowed_when_sampling_ahead() -> None:
    ahead = GRPOConfig.model_validate({"preset": "dapo", "asynchronous": {}})
    assert ahead.dynamic_sampling is not None
    assert ahead.dynamic_sampling.max_draws == 10


@pytest.mark.parametrize(
    ("generation", "most"),
    [
        ({}, 32),
        ({"max_num_seqs": 8}, 8),
        ({"tensor_parallel_size": 2}, 32),
        ({"num_engines": 2}, 20),  # a quarter more than its share
        ({"placement": {"own": 4}}, 10),
        ({"placement": {"own": 6}, "tensor_parallel_size": 2}, 14),
    ],
)
def test_an_engine_computes_at_most_its_share_of_a_step_at_once(
    generation: dict[str, Any], most: int
) -> None:
    trainer = AsyncGRPOTrainer.from_pretrained(
        "unused",
        asynchronous={},
        num_prompts_per_step=8,
        num_generations_per_prompt=4,
        cluster={"num_workers": 2},
        generation=generation,
    )
    sampler_settings = trainer._sampler_settings()
    assert sampler_settings.generation == trainer.settings.generation.model_copy(
        update={"max_num_seqs": most}
    )
    assert (
        sampler_settings.model_copy(update={"generation": trainer.settings.generation})
        == trainer.settings
    )
