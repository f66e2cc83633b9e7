"""The recipe of a sweep: a GRPO recipe, and fields of it that take several values each."""

from itertools import product
from typing import Any, NoReturn

from flytekit.types.error.error import FlyteError
from pydantic import Field, PositiveInt, field_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.errors import ConfigError
from tasks.platform.failures import failure_handler, leave_record
from tasks.platform.local import on_cluster
from tasks.platform.stage import plan_task
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    PipelineRecipe,
    Recipe,
    RecipeError,
    SFTTaskConfig,
    rollout_fields,
)
from tasks.recipes.grpo import GRPORecipe, GRPOTaskConfig
from tasks.recipes.verdict import ChooseQuestionsTaskConfig

Value = bool | int | float | str
"""What a field may be set to. Lists, not tuples, hold them: flytekit knows no tuples in records."""

SEED = "seed"
"""The field over which figures are averaged."""


class SweepRecipe(Recipe):
    """Every combination of the values is a whole GRPO run; equal stages of them are run once.

    Attributes:
        base: A GRPO recipe.
        over: Values by field, sections parted by dots: `{seed: [0, 1], grpo.learning_rate: [...]}`.
        concurrency: Points at a time, on a cluster; on one machine they take turns.
        min_success_ratio: The share of points that must end well for a summary.
        confidence: Level of the intervals over seeds, and of the test that a setting is the best.
    """

    base: GRPORecipe = GRPORecipe()
    over: dict[str, list[Value]] = Field(min_length=1)
    concurrency: PositiveInt = 1
    min_success_ratio: float = Field(default=1.0, gt=0, le=1)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)

    @field_validator("over")
    @classmethod
    def _each_has_values(cls, over: dict[str, list[Value]]) -> dict[str, list[Value]]:
        for name, values in over.items():
            if len(values) != len({repr(value) for value in values}) or not values:
                raise ConfigError(
                    f"the sweep's values of {name!r} are not usable",
                    expected="one or more values, each once",
                    got=repr(list(values)),
                    fix=f"correct over.{name}",
                )
        return over

    @field_validator("base")
    @classmethod
    def _the_budget_is_of_all_points(cls, base: GRPORecipe) -> GRPORecipe:
        if base.budget.max_gpu_hours is not None:
            raise ConfigError(
                "a sweep has one limit of GPU-hours for all of its points",
                expected="budget.max_gpu_hours beside base",
                got=f"base.budget.max_gpu_hours: {base.budget.max_gpu_hours}",
                fix="move it out of base",
            )
        return base

    @property
    def points(self) -> list[dict[str, Value]]:
        """Every combination of values, by field."""
        return [
            dict(zip(self.over, values, strict=True)) for values in product(*self.over.values())
        ]

    @property
    def experiments(self) -> list[PipelineRecipe]:
        """One a point."""
        return [self.experiment(point) for point in self.points]

    def experiment(self, point: dict[str, Value]) -> GRPORecipe:
        """The recipe of one point.

        Raises:
            RecipeError: For a field that the recipe has not, or a value that it cannot take.
        """
        words: dict[str, Any] = self.base.model_dump(mode="json")
        for name, value in point.items():
            *sections, field = name.split(".")
            section = words
            for each in sections:
                section = section.get(each) or section.setdefault(each, {})
            section[field] = value
        recipe = GRPORecipe.model_validate(words)
        if recipe.measure_base:
            _refuse(
                "a sweep does not evaluate models before their supervised start",
                expected="base.measure_base: false",
                got="true",
                fix="set it to false, or leave it out",
            )
        if recipe.evaluation is None:
            _refuse(
                "a sweep compares the accuracies of its points",
                expected="a section base.evaluation",
                got="evaluation: null",
                fix="leave it out",
            )
        if recipe.cluster.lifetime == "run":
            _refuse(
                "the points of a sweep run side by side, each on a Ray cluster of its own",
                expected="base.cluster.lifetime: stage, or not said",
                got="run",
                fix="leave it out, or run one recipe by itself",
            )
        return recipe


def _refuse(problem: str, *, expected: str, got: str, fix: str) -> NoReturn:
    raise RecipeError(str(ConfigError(problem, expected=expected, got=got, fix=fix)))


class PointTaskConfig(FrozenConfig):
    """Config of `sweep_point`.

    Attributes:
        point: Values of the swept fields, which name the point in the run's record and output.
        grpo: The GRPO run.
        num_iterations: Number of its iterations.
        evaluation: The evaluation of its last checkpoint.
    """

    point: dict[str, Value]
    grpo: GRPOTaskConfig
    num_iterations: int
    evaluation: EvaluationTaskConfig | None


class PointPlan(FrozenConfig):
    """What one point begins with, and its own stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    point: PointTaskConfig

    @classmethod
    def of(cls, config: GRPORecipe, point: dict[str, Value]) -> "PointPlan":
        """Returns the plan of a point from its recipe and its values of the swept fields."""
        grpo = GRPOTaskConfig(grpo=config.grpo.iteration, **rollout_fields(config))
        return cls(
            model=ModelTaskConfig.of(config),
            data=DataTaskConfig.of(config),
            questions=ChooseQuestionsTaskConfig.of(config),
            sft=SFTTaskConfig.of(config),
            point=PointTaskConfig(
                point=point,
                grpo=grpo,
                num_iterations=config.grpo.num_iterations,
                evaluation=EvaluationTaskConfig.of(config),
            ),
        )


class SummaryTaskConfig(FrozenConfig):
    """What `summarize_sweep` reads: the values of each point, in the order of the reports."""

    points: list[dict[str, Value]]
    confidence: float


class SweepPlan(FrozenConfig):
    """The settings of each stage."""

    points: list[PointPlan]
    concurrency: int
    min_success_ratio: float
    summary: SummaryTaskConfig


@plan_task
def plan_sweep(config: SweepRecipe) -> SweepPlan:
    """Deals the recipe out to the points."""
    if on_cluster():
        _refuse_other_shapes(config)
    return SweepPlan(
        points=[PointPlan.of(config.experiment(point), point) for point in config.points],
        concurrency=config.concurrency,
        min_success_ratio=config.min_success_ratio,
        summary=SummaryTaskConfig(points=config.points, confidence=config.confidence),
    )


def _refuse_other_shapes(config: SweepRecipe) -> None:
    """Refuses GPUs on a cluster, where one mapped task has all points, and that without any."""
    for point in config.points:
        experiment = config.experiment(point)
        asked = [f"{each.path} {each.number}" for each in experiment.own_bundles]
        if experiment.cluster.shape != "laptop" or asked:
            raise ConfigError(
                "the points of a sweep have no GPUs on a cluster",
                expected="base.cluster.shape laptop, and no placement: {own: n}",
                got=", ".join([f"shape {experiment.cluster.shape}", *asked]),
                fix="schedule or run each point as a pipeline of its own, `nemo-rl run grpo RECIPE "
                "KEY=VALUE --remote`, or run the sweep on one machine with GPUs",
            )


@failure_handler
def record_failure(config: SweepRecipe, err: FlyteError | None = None) -> None:
    """After `workflows/sweep.py`."""
    leave_record("sweep", "sweep", config, err)
