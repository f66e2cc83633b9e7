"""Evaluates a model, or compares two on the same prompts, without training.

`pyflyte run workflows/evaluate.py evaluate_model [--config RECIPE]`
"""

from typing import NamedTuple

from flytekit import workflow

from tasks.artifacts import Checkpoint, Comparison, Dataset, Evaluation
from tasks.evaluate import evaluate
from tasks.evaluate_comparison import compare
from tasks.evaluate_questions import evaluate_questions
from tasks.plan_tasks.evaluate import plan_evaluate, record_failure
from tasks.prepare_model import prepare_model
from tasks.recipes.common import EvaluationTaskConfig, default_recipe
from tasks.recipes.evaluate import BaselineTaskConfig, EvaluateRecipe
from tasks.stage.stage import dynamic_stage

DEFAULT = default_recipe(EvaluateRecipe, "evaluate_arithmetic")


class EvaluatedModel(NamedTuple):
    """The figures of the model, and the comparison if there is a baseline."""

    report: Evaluation
    comparison: list[Comparison]


@dynamic_stage
def measure_model(
    config: EvaluationTaskConfig, checkpoint: Checkpoint, validation: Dataset
) -> Evaluation:
    """Evaluates on the recipe's cluster."""
    return evaluate.on(config.cluster, config.dedicated_bundles)(
        config=config, checkpoint=checkpoint, validation=validation
    )


@dynamic_stage
def compare_with(
    config: BaselineTaskConfig, questions: Dataset, after: Evaluation
) -> list[Comparison]:
    """Evaluates the baseline on the same prompts and compares, if the recipe has one."""
    if config.model is None:
        return []
    baseline = prepare_model(config=config.model)
    before = evaluate.on(config.evaluation.cluster, config.evaluation.dedicated_bundles)(
        config=config.evaluation, checkpoint=baseline.base, validation=questions
    )
    return [compare(config=config.comparison, before=before, after=after)]


@workflow(on_failure=record_failure)
def evaluate_model(config: EvaluateRecipe = DEFAULT) -> EvaluatedModel:
    """prepare → questions → evaluate → compare, if there is a baseline."""
    stages = plan_evaluate(config=config)
    model = prepare_model(config=stages.model)
    questions = evaluate_questions(config=stages.questions, tokenizer=model.tokenizer)
    report = measure_model(config=stages.evaluation, checkpoint=model.base, validation=questions)
    comparison = compare_with(config=stages.baseline, questions=questions, after=report)
    return EvaluatedModel(report, comparison)
