"""The recipe of a PPO run."""

from nemo_rl_core.algorithms.ppo.config import PPOSchedule, PPOSettings
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.trainer import refuse_without_scalar_head
from nemo_rl_core.config.training import Head
from tasks.recipes.common import PipelineRecipe


class PPORecipe(PipelineRecipe):
    """Recipe of a PPO run.

    Attributes:
        ppo: Proximal policy optimization.
    """

    ppo: PPOSchedule = PPOSchedule()

    @property
    def trained_heads(self) -> list[Head]:
        """The policy's, and the critic's."""
        return ["lm", "scalar"]

    def refuse_contradictions(self) -> None:
        """Refuses a critic without a scalar head, and settings that do not fit sampled rollouts."""
        refuse_without_scalar_head(self.training)
        refuse_for_training(self.generation)


class PPOTaskConfig(PPOSettings):
    """Config of `ppo_iteration`."""

    reward_content: str
