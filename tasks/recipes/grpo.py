"""The recipe of a GRPO run."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.grpo.advantage_config import GDPO
from nemo_rl_core.algorithms.grpo.config import (
    GRPOConfig,
    GRPOSchedule,
    GRPOSettings,
    refuse_overlong,
    refuse_sampling_ahead,
)
from nemo_rl_core.config.environment import EnvironmentConfig, WeightedSum
from nemo_rl_core.config.export import ExportConfig
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.trainer import refuse_judge_beside_others
from nemo_rl_core.errors import ConfigError
from tasks.platform.failures import failure_handler, leave_record
from tasks.platform.stage import plan_task
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    PipelineRecipe,
    SFTTaskConfig,
    rollout_fields,
)
from tasks.recipes.verdict import ChooseQuestionsTaskConfig, VerdictConfig


class GRPORecipe(PipelineRecipe):
    """All of a GRPO run.

    Attributes:
        grpo: Group-relative policy optimization.
        measure_base: Evaluates the model before its supervised start, too, for the figures of all
            three: as it came, after SFT, and after GRPO.
    """

    grpo: GRPOSchedule = GRPOSchedule()
    measure_base: bool = False

    def refuse_contradictions(self) -> None:
        """GRPO must fit what it samples and what scores."""
        if self.measure_base and self.evaluation is None:
            raise ConfigError(
                "measure_base evaluates a model, and the recipe switches evaluation off",
                expected="measure_base: false, or a section evaluation",
                got="measure_base: true with evaluation: null",
                fix="leave one of the two out",
            )
        if self.measure_base and self.sft is None:
            raise ConfigError(
                "measure_base evaluates the model before its supervised start, and there is none",
                expected="a section sft, or measure_base: false",
                got="measure_base: true without sft",
                fix="leave measure_base out: the model is evaluated before GRPO in any case",
            )
        refuse_unfit(self.grpo, self.environment, self)


def refuse_unfit(grpo: GRPOConfig, reward: EnvironmentConfig, recipe: PipelineRecipe) -> None:
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
    refuse_judge_beside_others(
        recipe.cluster, recipe.generation, reward, samples_ahead=grpo.asynchronous is not None
    )
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
    """What `grpo_iteration` reads."""

    reward_content: str


class GRPOPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    grpo: GRPOTaskConfig
    num_iterations: int
    base_evaluation: EvaluationTaskConfig | None
    evaluation: EvaluationTaskConfig | None
    verdict: VerdictConfig
    export: ExportConfig


@plan_task
def plan_grpo(config: GRPORecipe) -> GRPOPlan:
    """Deals the recipe out to the stages."""
    evaluation = EvaluationTaskConfig.of(config)
    return GRPOPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=ChooseQuestionsTaskConfig.of(config),
        sft=SFTTaskConfig.of(config),
        grpo=GRPOTaskConfig(grpo=config.grpo.iteration, **rollout_fields(config)),
        num_iterations=config.grpo.num_iterations,
        base_evaluation=evaluation if config.measure_base else None,
        evaluation=evaluation,
        verdict=VerdictConfig.of(config),
        export=config.export,
    )


@failure_handler
def record_failure(config: GRPORecipe, err: FlyteError | None = None) -> None:
    """After `workflows/grpo.py`."""
    leave_record("grpo", "grpo", config, err)
