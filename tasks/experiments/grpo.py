"""The recipe of a GRPO run."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.grpo.config import (
    GDPO,
    GRPOConfig,
    GRPOSchedule,
    GRPOSettings,
    refuse_overlong,
    refuse_sampling_ahead,
)
from nemo_rl_core.config.environment import EnvironmentConfig, WeightedSum
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.errors import ConfigError
from tasks.experiments.common import (
    DataStage,
    EvaluationStage,
    Experiment,
    ModelStage,
    PromotionStage,
    QuestionStage,
    SFTStage,
    rollout_fields,
)
from tasks.failures import failure_handler, leave_record
from tasks.stage import plan_task


class GRPOExperiment(Experiment):
    """All of a GRPO run.

    Attributes:
        grpo: Group-relative policy optimization.
    """

    grpo: GRPOSchedule = GRPOSchedule()

    def refuse_contradictions(self) -> None:
        """GRPO must fit what it samples and what scores."""
        refuse_unfit(self.grpo, self.environment, self)


def refuse_unfit(grpo: GRPOConfig, reward: EnvironmentConfig, recipe: Experiment) -> None:
    """Refuses settings of GRPO that what it samples and what scores do not fit.

    Args:
        grpo: The settings.
        reward: What scores in it.
        recipe: Says what is sampled.

    Raises:
        ConfigError: For the first such setting.
    """
    refuse_for_training(recipe.generation)
    refuse_sampling_ahead(grpo, recipe.generation)
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


class GRPOStage(GRPOSettings):
    """What `grpo_iteration` reads."""

    reward_content: str


class GRPOPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelStage
    data: DataStage
    questions: QuestionStage
    sft: SFTStage
    grpo: GRPOStage
    num_iterations: int
    evaluation: EvaluationStage
    promotion: PromotionStage


@plan_task
def plan_grpo(config: GRPOExperiment) -> GRPOPlan:
    """Deals the recipe out to the stages."""
    return GRPOPlan(
        model=ModelStage.of(config),
        data=DataStage.of(config),
        questions=QuestionStage.of(config),
        sft=SFTStage.of(config),
        grpo=GRPOStage(grpo=config.grpo.iteration, **rollout_fields(config)),
        num_iterations=config.grpo.num_iterations,
        evaluation=EvaluationStage.of(config),
        promotion=PromotionStage.of(config),
    )


@failure_handler
def record_failure(config: GRPOExperiment, err: FlyteError | None = None) -> None:
    """After `workflows/grpo.py`."""
    leave_record("grpo", "grpo", config, err)
