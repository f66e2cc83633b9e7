"""GRPO over seeds and learning rates, or any other fields of its recipe, and a summary.

`pyflyte run workflows/sweep.py sweep [--config workflows/recipes/NAME.yaml]`
"""

from typing import NamedTuple

from flytekit import map_task, workflow

from nemo_rl_core.store.manifest import config_hash
from tasks.artifacts import Report, Summary
from tasks.plan_tasks.sweep import plan_sweep, record_failure
from tasks.recipes.common import default_recipe
from tasks.recipes.sweep import SweepPlan, SweepRecipe
from tasks.stage.stage import dynamic_stage
from tasks.summarize_sweep import summarize_sweep
from tasks.sweep_point import sweep_point
from workflows.common import begin

DEFAULT = default_recipe(SweepRecipe, "sweep_arithmetic")

# With a ratio of 1, flytekit returns a list without None, unlike with a lower one. The number of
# tasks that must succeed is rounded up, so this ratio means all of them, too.
_ALMOST_ALL = 0.999999


class Swept(NamedTuple):
    """Outputs of a sweep; a point that failed is None."""

    summary: Summary
    points: list[Report | None]


@dynamic_stage
def run_points(plan: SweepPlan) -> list[Report | None]:
    """Prepares each distinct start once, and then runs all points in parallel."""
    begun = {}
    starts = []
    for point in plan.points:
        parts = (point.model, point.data, point.questions, point.sft)
        key = config_hash(parts)
        if key not in begun:
            model, data, questions, sft = parts
            begun[key] = begin(model=model, data=data, questions=questions, sft=sft)
        starts.append(begun[key])
    run = map_task(
        sweep_point,
        concurrency=plan.concurrency,
        min_success_ratio=min(plan.min_success_ratio, _ALMOST_ALL),
    )
    return run(
        config=[point.point for point in plan.points],
        start=[start.checkpoint for start in starts],
        train=[start.train for start in starts],
        validation=[start.validation for start in starts],
        questions=[start.questions for start in starts],
    )


@workflow(on_failure=record_failure)
def sweep(config: SweepRecipe = DEFAULT) -> Swept:
    """plan → begin, once for equal ones → points, mapped → summary."""
    plan = plan_sweep(config=config)
    points = run_points(plan=plan)
    return Swept(summarize_sweep(config=plan.summary, reports=points), points)
