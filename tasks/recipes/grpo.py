"""The recipe of a GRPO run."""

from nemo_rl_core.algorithms.grpo.advantage_config import GDPO
from nemo_rl_core.algorithms.grpo.config import (
    GRPOConfig,
    GRPOSchedule,
    GRPOSettings,
    refuse_overlong,
    refuse_turn_credit,
)
from nemo_rl_core.config.environment import EnvironmentConfig, WeightedSum
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.trainer import refuse_busy_judge_gpu
from nemo_rl_core.errors import ConfigError
from tasks.recipes.common import PipelineRecipe


class GRPORecipe(PipelineRecipe):
    """Recipe of a GRPO run, as users write it; `plan_grpo` splits it.

    Attributes:
        grpo: Group-relative policy optimization.
        measure_base: Whether to evaluate the model before its supervised start, too, for figures of
            all three: the original model, after SFT, and after GRPO.
    """

    grpo: GRPOSchedule = GRPOSchedule()
    measure_base: bool = False

    def refuse_contradictions(self) -> None:
        """Refuses settings of GRPO that do not fit its sampling and scoring."""
        if self.measure_base and self.evaluation is None:
            raise ConfigError(
                "measure_base evaluates a model, but the recipe switches evaluation off",
                expected="measure_base: false, or a section evaluation",
                got="measure_base: true with evaluation: null",
                fix="leave one of the two out",
            )
        if self.measure_base and self.sft is None:
            raise ConfigError(
                "measure_base evaluates the model before its supervised start, but it has none",
                expected="a section sft, or measure_base: false",
                got="measure_base: true without sft",
                fix="leave measure_base out: the model is evaluated before GRPO in any case",
            )
        refuse_unfit(self.grpo, self.environment, self)


def refuse_unfit(grpo: GRPOConfig, reward: EnvironmentConfig, recipe: PipelineRecipe) -> None:
    """Refuses settings of GRPO that do not fit its sampling and scoring."""
    refuse_for_training(recipe.generation)
    refuse_busy_judge_gpu(
        recipe.cluster, recipe.generation, reward, samples_ahead=grpo.asynchronous is not None
    )
    refuse_turn_credit(grpo, reward)
    try:
        refuse_overlong(grpo, longest=recipe.rollouts.room(recipe.generation))
    except ValueError as error:
        raise ConfigError(str(error), fix="set grpo.overlong in the recipe") from error
    if isinstance(grpo.advantage, GDPO):
        num_rewards = len(reward.parts) if isinstance(reward, WeightedSum) else 1
        if num_rewards != len(grpo.advantage.weights):
            raise ConfigError(
                "advantage 'gdpo' has a weight for each of several rewards",
                expected=f"an environment with {len(grpo.advantage.weights)} rewards",
                got=f"{num_rewards} from the environment {reward.kind!r}",
                fix="use the environment 'weighted_sum' with as many parts as weights",
            )


class GRPOTaskConfig(GRPOSettings):
    """Config of `grpo_iteration`, whose key includes the code and files of the rewards."""

    reward_content: str
