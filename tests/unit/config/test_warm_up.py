"""Warm-ups that do not outlast a run."""

import logging
from typing import Any

import pytest

from nemo_rl_core.algorithms.grpo.config import GRPOSchedule
from nemo_rl_core.algorithms.ppo.config import PPOSchedule
from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.config.warm_up import warm_up_warnings
from tasks.local_run.preflight import preflight
from tasks.recipes.grpo import GRPORecipe


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"num_steps_per_iteration": 3, "num_iterations": 1}, 0),
        ({"num_steps_per_iteration": 2, "num_iterations": 2}, 1),
        ({"num_steps_per_iteration": 10, "num_iterations": 2}, 5),
        ({"num_steps_per_iteration": 100}, 10),
        ({}, 10),
        ({"num_steps_per_iteration": 3, "num_warmup_steps": 2}, 2),
        ({"num_steps_per_iteration": 3, "learning_rate": 1e-6}, 0),
    ],
)
def test_the_default_follows_the_number_of_steps(section: dict[str, Any], expected: int) -> None:
    recipe = GRPORecipe.model_validate({"model": {"name": "org/model"}, "grpo": section})
    assert recipe.grpo.num_warmup_steps == expected


@pytest.mark.parametrize(
    ("config", "sentences"),
    [
        (SFTConfig(num_steps=4, num_warmup_steps=4), []),
        (
            SFTConfig(num_steps=4, num_warmup_steps=10, learning_rate=1e-5),
            ["num_warmup_steps is 10, but the run has 4 optimizer steps: the learning rate ends "
             "at 4e-06 and never reaches 1e-05"],
        ),
        # 2 iterations of 3 steps, each with 32 x 16 / 256 = 2 optimizer steps.
        (
            GRPOSchedule(num_iterations=2, num_steps_per_iteration=3,
                         train_global_batch_size=256, num_warmup_steps=12),
            [],
        ),
        (
            GRPOSchedule(num_iterations=2, num_steps_per_iteration=3,
                         train_global_batch_size=256, num_warmup_steps=13),
            ["the run has 12 optimizer steps"],
        ),
        # 2 epochs on the rollouts of each of 3 steps.
        (
            PPOSchedule(num_iterations=1, num_steps_per_iteration=3, num_critic_warmup_steps=3,
                        critic={"num_warmup_steps": 7}),
            ["critic.num_warmup_steps is 7, but the run has 6 optimizer steps",
             "num_critic_warmup_steps is 3, but the run has 3 steps: the policy is never trained"],
        ),
    ],
)  # fmt: skip
def test_a_warm_up_that_outlasts_the_run_is_reported(config: Any, sentences: list[str]) -> None:
    warnings = list(warm_up_warnings("x", config))
    assert len(warnings) == len(sentences)
    for sentence, warning in zip(sentences, warnings, strict=True):
        assert warning.startswith("x.")
        assert sentence in warning


def test_a_recipe_is_checked_before_the_run(caplog: pytest.LogCaptureFixture) -> None:
    config = GRPORecipe.model_validate({"sft": {"num_steps": 4, "num_warmup_steps": 5}})
    with caplog.at_level(logging.WARNING):
        preflight({"config": config})
    assert "sft.num_warmup_steps is 5, but the run has 4 optimizer steps" in caplog.text
