"""Requirements and defaults of asynchronous GRPO."""

from typing import Any

import pytest

from nemo_rl_core.algorithms.grpo.config import GRPOConfig, GRPOSettings
from nemo_rl_core.algorithms.grpo.loss_config import TruncatedImportance
from nemo_rl_core.errors import ConfigError


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
    # A config that crosses Flyte comes back as it was.
    assert GRPOConfig.model_validate(ahead.model_dump()) == ahead


@pytest.mark.parametrize(
    ("grpo", "words"),
    [
        ({"dynamic_sampling": {}}, "sampled ahead"),
        ({"loss": {"kind": "on_policy"}}, "max_staleness is 1"),
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused(grpo: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GRPOConfig.model_validate({"asynchronous": {}, **grpo})


@pytest.mark.parametrize("generation", [{"backend": "hf"}, {"num_engines": 2}])
def test_an_engine_that_cannot_take_weights_meanwhile_is_refused(generation: Any) -> None:
    settings = {
        "grpo": {"asynchronous": {}},
        "generation": generation,
        "cluster": {"num_workers": 2},
    }
    with pytest.raises(ConfigError, match="takes weights while it generates"):
        GRPOSettings.model_validate(settings)
    GRPOSettings.model_validate({**settings, "grpo": {}})
