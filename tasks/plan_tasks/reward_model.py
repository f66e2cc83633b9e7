"""Splits the recipe of the training of a reward model, and records a failure."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from tasks.plan_tasks.failures import failure_handler, leave_record
from tasks.recipes.common import (
    DataTaskConfig,
    ModelTaskConfig,
    SFTTaskConfig,
    trainer_fields,
)
from tasks.recipes.pairs import PairPlan
from tasks.recipes.reward_model import (
    RewardModelEvaluationTaskConfig,
    RewardModelRecipe,
    RewardModelTaskConfig,
)
from tasks.recipes.verdict import ChooseQuestionsTaskConfig
from tasks.stage.stage import plan_task


class RewardModelPlan(NamedTuple):
    """The config of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    pairs: PairPlan
    reward_model: RewardModelTaskConfig
    evaluation: RewardModelEvaluationTaskConfig | None


@plan_task
def plan_reward_model(config: RewardModelRecipe) -> RewardModelPlan:
    """Splits the recipe into the configs of its stages."""
    return RewardModelPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=ChooseQuestionsTaskConfig.of(config).replace(evaluates=False, data=None),
        sft=SFTTaskConfig.of(config),
        pairs=PairPlan.of(config),
        reward_model=RewardModelTaskConfig(
            reward_model=config.reward_model, **trainer_fields(config)
        ),
        evaluation=RewardModelEvaluationTaskConfig.of(config),
    )


@failure_handler
def record_failure(config: RewardModelRecipe, err: FlyteError | None = None) -> None:
    """Records a failure of `workflows/reward_model.py`."""
    leave_record("reward_model", "reward_model", config, err)
