"""A model measured, or two compared on the same prompts; nothing is trained.

`pyflyte run workflows/evaluate.py evaluate_model [--config RECIPE]`
"""

from typing import NamedTuple

from flytekit import workflow

from tasks.artifacts import Checkpoint, Comparison, Dataset, Evaluation
from tasks.evaluate import evaluate
from tasks.evaluate_comparison import compare
from tasks.evaluate_questions import evaluate_questions
from tasks.platform.stage import choice
from tasks.prepare_model import prepare_model
from tasks.recipes import evaluate as recipes
from tasks.recipes.common import EvaluationTaskConfig, default_recipe
from tasks.recipes.evaluate import BaselineTaskConfig, EvaluateRecipe, plan_evaluate

DEFAULT = default_recipe(EvaluateRecipe, "evaluate_arithmetic")


class EvaluatedModel(NamedTuple):
    """The figures of the model, and what the comparison says, where there is a baseline."""

    report: Evaluation
    comparison: list[Comparison]


@choice
def measure_model(
    config: EvaluationTaskConfig, checkpoint: Checkpoint, validation: Dataset
) -> Evaluation:
    """An evaluation, on the cluster that the recipe asks for."""
    return evaluate.on(config.cluster, config.own_bundles)(
        config=config, checkpoint=checkpoint, validation=validation
    )


@choice
def compare_with(
    config: BaselineTaskConfig, questions: Dataset, after: Evaluation
) -> list[Comparison]:
    """The baseline measured on the same prompts, where the recipe has one; else nothing."""
    if config.model is None:
        return []
    baseline = prepare_model(config=config.model)
    before = evaluate.on(config.evaluation.cluster, config.evaluation.own_bundles)(
        config=config.evaluation, checkpoint=baseline.base, validation=questions
    )
    return [compare(config=config.comparison, before=before, after=after)]


@workflow(on_failure=recipes.record_failure)
def evaluate_model(config: EvaluateRecipe = DEFAULT) -> EvaluatedModel:
    """prepare → questions → evaluate → compare, where there is a baseline."""
    stages = plan_evaluate(config=config)
    model = prepare_model(config=stages.model)
    questions = evaluate_questions(config=stages.questions, tokenizer=model.tokenizer)
    report = measure_model(config=stages.evaluation, checkpoint=model.base, validation=questions)
    comparison = compare_with(config=stages.baseline, questions=questions, after=report)
    return EvaluatedModel(report, comparison)
