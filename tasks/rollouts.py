"""From a stage's settings to the core's."""

from typing import TYPE_CHECKING

from tasks.experiment import RolloutStage

if TYPE_CHECKING:
    from nemo_rl_core.rollouts.sampler import RolloutSetup


def rollout_setup(config: RolloutStage) -> "RolloutSetup":
    """How the stage samples and scores."""
    from nemo_rl_core.rollouts.sampler import RolloutSetup

    return RolloutSetup(
        generation=config.generation,
        environment=config.environment,
        dtype=config.dtype,
        max_prompt_tokens=config.max_prompt_tokens,
        seed=config.seed,
    )
