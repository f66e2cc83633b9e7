"""The recipe of a complete post-training: SFT, reward model, DPO, GRPO."""

from nemo_rl_core.algorithms.dpo.config import DPOSchedule
from nemo_rl_core.algorithms.grpo.config import GRPOSchedule
from nemo_rl_core.algorithms.reward_model.config import RewardModelConfig
from nemo_rl_core.config.environment import EnvironmentConfig, reads_reward_model
from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.config.multi_turn import ToolUse
from nemo_rl_core.config.single_turn import RewardModelScore
from nemo_rl_core.config.trainer import refuse_without_scalar_head
from nemo_rl_core.config.training import Head
from nemo_rl_core.errors import ConfigError
from tasks.recipes.grpo import refuse_unfit
from tasks.recipes.pairs import PairRecipe


class PostTrainRecipe(PairRecipe):
    """Recipe of a post-training.

    `environment` scores the evaluation and the completions for pairs; GRPO maximizes
    `grpo_reward`, by default the reward model that the pipeline has just trained.

    Attributes:
        reward_model: Training of the reward model.
        dpo: Direct preference optimization.
        grpo: Group-relative policy optimization.
        grpo_reward: The environment that scores GRPO's completions.
    """

    reward_model: RewardModelConfig = RewardModelConfig()
    dpo: DPOSchedule = DPOSchedule()
    grpo: GRPOSchedule = GRPOSchedule()
    grpo_reward: EnvironmentConfig = RewardModelScore()

    @property
    def trained_heads(self) -> list[Head]:
        """The policy's, and the reward model's."""
        return ["lm", "scalar"]

    def refuse_contradictions(self) -> None:
        """Refuses unfit settings of GRPO, a missing scalar head, and tools that only SFT shows."""
        refuse_without_scalar_head(self.training)
        refuse_unfit(self.grpo, self.grpo_reward, self)
        shown, sampled = (
            [*each.tools] if isinstance(each, ToolUse) else []
            for each in (self.environment, self.grpo_reward)
        )
        if self.sft is not None and shown != sampled:
            raise ConfigError(
                "the supervised start shows the tools of environment, and GRPO those of "
                "grpo_reward",
                expected="the same tools in both",
                got=f"{len(shown)} tools in environment, {len(sampled)} in grpo_reward",
                fix="give both the same tools, or set sft: null",
            )

    @property
    def samplings(self) -> list[tuple[SamplingConfig, EnvironmentConfig, str]]:
        """The samplings of pairs and evaluation, and of GRPO."""
        return [*super().samplings, (self.generation, self.grpo_reward, "grpo_reward")]

    @property
    def rewards(self) -> list[EnvironmentConfig]:
        """The environments of pairs and evaluation, and of GRPO unless the pipeline trains it."""
        return [
            reward
            for _, reward, path in self.samplings
            if path != "grpo_reward" or not reads_reward_model(reward)
        ]
