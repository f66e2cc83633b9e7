"""Compares a model with a baseline, and fails if it is worse.

`pyflyte run workflows/regression.py check_regression --config RECIPE`
"""

from typing import NamedTuple

from flytekit import workflow

from tasks.artifacts import Comparison, Evaluation
from tasks.plan_tasks.evaluate import record_refusal
from tasks.recipes.common import default_recipe
from tasks.recipes.evaluate import RegressionRecipe
from tasks.refuse_regression import refuse_regression
from workflows.evaluate import evaluate_model

DEFAULT = default_recipe(RegressionRecipe, "regression_arithmetic")


class Checked(NamedTuple):
    """The figures of the model, and its comparison with the baseline."""

    report: Evaluation
    comparison: Comparison


@workflow(on_failure=record_refusal)
def check_regression(config: RegressionRecipe = DEFAULT) -> Checked:
    """prepare → questions → evaluate both → compare → refuse a worse model."""
    measured = evaluate_model(config=config)
    comparison = refuse_regression(comparisons=measured.comparison)
    return Checked(measured.report, comparison)
