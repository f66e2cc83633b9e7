"""Sections of algorithms are matched by their fields, not by inheritance."""

import pytest
from pydantic import PositiveInt

from nemo_rl_core.algorithms.distillation.config import DistillationConfig
from nemo_rl_core.algorithms.dpo.config import DPOConfig
from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.algorithms.ppo.config import PPOConfig
from nemo_rl_core.algorithms.reward_model.config import RewardModelConfig
from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.config.trainer import LoopConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.loop import StepRange
from nemo_rl_core.trainers.sections import (
    Gated,
    PlainLoop,
    rows_per_step,
    samples_per_step,
    steps_of,
)


class OwnConfig(LoopConfig):
    num_steps: PositiveInt = 3
    num_prompts_per_step: PositiveInt = 2
    num_generations_per_prompt: PositiveInt = 4


@pytest.mark.parametrize("kind", [SFTConfig, RewardModelConfig, DistillationConfig, PlainLoop])
def test_a_run_in_one_stage_has_the_same_steps_in_every_iteration(kind: type[LoopConfig]) -> None:
    config = kind.model_validate({"num_steps": 7})
    assert steps_of(config, 1) == steps_of(config, 3) == StepRange(1, 7)


@pytest.mark.parametrize("kind", [DPOConfig, GRPOConfig, PPOConfig])
def test_iterations_follow_one_another(kind: type[LoopConfig]) -> None:
    config = kind.model_validate({"num_steps_per_iteration": 10})
    assert [steps_of(config, 1), steps_of(config, 3)] == [StepRange(1, 10), StepRange(21, 30)]


def test_a_custom_section_is_matched_by_its_fields() -> None:
    config = OwnConfig()
    sampling = samples_per_step(config)
    assert steps_of(config, 1) == StepRange(1, 3)
    assert (sampling.num_prompts_per_step, sampling.num_generations_per_prompt) == (2, 4)
    assert rows_per_step(PlainLoop(global_batch_size=5)).global_batch_size == 5
    gated = [kind() for kind in (GRPOConfig, PPOConfig, DistillationConfig, OwnConfig)]
    assert [isinstance(config, Gated) for config in gated] == [True, True, False, False]


def test_a_section_without_required_fields_is_refused() -> None:
    with pytest.raises(ConfigError, match="LoopConfig lacks") as steps:
        steps_of(LoopConfig(learning_rate=0.1), 1)
    assert "num_steps or num_steps_per_iteration" in str(steps.value.expected)
    with pytest.raises(ConfigError, match="SFTConfig lacks") as samples:
        samples_per_step(SFTConfig())
    assert "num_prompts_per_step and" in str(samples.value.expected)
    with pytest.raises(ConfigError, match="OwnConfig lacks") as rows:
        rows_per_step(OwnConfig())
    assert "global_batch_size" in str(rows.value.expected)
    assert "OwnConfig" in str(rows.value.fix)
