"""Splits the recipe of an evaluation or a regression check, and records a failure."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from tasks.plan_tasks.failures import failure_handler, leave_record
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
)
from tasks.recipes.evaluate import (
    BaselineTaskConfig,
    ComparisonTaskConfig,
    EvaluateRecipe,
    RegressionRecipe,
)
from tasks.recipes.verdict import QuestionsTaskConfig
from tasks.stage.stage import plan_task


class EvaluatePlan(NamedTuple):
    """The config of each stage."""

    model: ModelTaskConfig
    questions: QuestionsTaskConfig
    evaluation: EvaluationTaskConfig
    baseline: BaselineTaskConfig


@plan_task
def plan_evaluate(config: EvaluateRecipe) -> EvaluatePlan:
    """Splits the recipe into the configs of its stages."""
    evaluation = EvaluationTaskConfig.of(config)
    assert evaluation is not None, "the recipe refuses to switch evaluation off"
    question_recipe = config.replace(data=config.question_data)
    baseline = None
    if config.baseline is not None:
        baseline = ModelTaskConfig.of(config.replace(model=config.baseline))
    return EvaluatePlan(
        model=ModelTaskConfig.of(config),
        questions=QuestionsTaskConfig(questions=DataTaskConfig.of(question_recipe)),
        evaluation=evaluation,
        baseline=BaselineTaskConfig(
            model=baseline,
            evaluation=evaluation,
            comparison=ComparisonTaskConfig(confidence=evaluation.evaluation.confidence),
        ),
    )


@failure_handler
def record_failure(config: EvaluateRecipe, err: FlyteError | None = None) -> None:
    """Records a failure of `workflows/evaluate.py`."""
    leave_record("evaluate", "evaluate_model", config, err)


@failure_handler
def record_refusal(config: RegressionRecipe, err: FlyteError | None = None) -> None:
    """Records a failure of `workflows/regression.py`, or its refusal of the model."""
    leave_record("regression", "check_regression", config, err)
