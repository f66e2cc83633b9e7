"""Splits the recipe of a sweep into configs of stages, and records a failure."""

from flytekit.types.error.error import FlyteError

from nemo_rl_core.errors import ConfigError
from tasks.flyte.local import on_cluster
from tasks.plan_tasks.failures import failure_handler, leave_record
from tasks.recipes.sweep import PointPlan, SummaryTaskConfig, SweepPlan, SweepRecipe
from tasks.stage.stage import plan_task


@plan_task
def plan_sweep(config: SweepRecipe) -> SweepPlan:
    """Splits the recipe into the plans of its points."""
    if on_cluster():
        _refuse_other_shapes(config)
    return SweepPlan(
        points=[PointPlan.of(config.experiment(point), point) for point in config.points],
        concurrency=config.concurrency,
        min_success_ratio=config.min_success_ratio,
        summary=SummaryTaskConfig(points=config.points, confidence=config.confidence),
    )


def _refuse_other_shapes(config: SweepRecipe) -> None:
    """Refuses GPUs on a cluster, where one mapped task without any has all points."""
    for point in config.points:
        experiment = config.experiment(point)
        dedicated = [f"{each.path} {each.number}" for each in experiment.dedicated_bundles]
        if experiment.cluster.shape != "laptop" or dedicated:
            raise ConfigError(
                "the points of a sweep have no GPUs on a cluster",
                expected="base.cluster.shape laptop, and no placement: {own: n}",
                got=", ".join([f"shape {experiment.cluster.shape}", *dedicated]),
                fix="schedule or run each point as a separate pipeline, `nemo-rl run grpo RECIPE "
                "KEY=VALUE --remote`, or run the sweep on one machine with GPUs",
            )


@failure_handler
def record_failure(config: SweepRecipe, err: FlyteError | None = None) -> None:
    """Records a failure of `workflows/sweep.py`."""
    leave_record("sweep", "sweep", config, err)
