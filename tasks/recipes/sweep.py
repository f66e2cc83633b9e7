"""The recipe of a sweep: a GRPO recipe, and several values for some of its fields."""

from itertools import product
from typing import Any, NoReturn

from pydantic import Field, PositiveInt, field_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.errors import ConfigError
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
"""Values of a field. They are in lists, not tuples: flytekit has no tuples in records."""

SEED = "seed"
"""The field over which metrics are averaged."""


class SweepRecipe(Recipe):
    """Runs GRPO completely for every combination of values; equal stages are run once.

    Attributes:
        base: A GRPO recipe.
        over: Values by field, with dots for sections: `{seed: [0, 1], grpo.learning_rate: [...]}`.
        concurrency: Points at a time, on a cluster; on one machine they run one after the other.
        min_success_ratio: Share of points that must succeed for a summary.
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
                expected="budget.max_gpu_hours next to base",
                got=f"base.budget.max_gpu_hours: {base.budget.max_gpu_hours}",
                fix="move it out of base",
            )
        return base

    @property
    def points(self) -> list[dict[str, Value]]:
        """Returns every combination of values, by field."""
        return [
            dict(zip(self.over, values, strict=True)) for values in product(*self.over.values())
        ]

    @property
    def experiments(self) -> list[PipelineRecipe]:
        """One recipe per point."""
        return [self.experiment(point) for point in self.points]

    def experiment(self, point: dict[str, Value]) -> GRPORecipe:
        """Returns the recipe of one point."""
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
                "the points of a sweep run in parallel, each on its own Ray cluster",
                expected="base.cluster.lifetime: stage, or unset",
                got="run",
                fix="leave it out, or run one recipe by itself",
            )
        return recipe


def _refuse(problem: str, *, expected: str, got: str, fix: str) -> NoReturn:
    raise RecipeError(str(ConfigError(problem, expected=expected, got=got, fix=fix)))


class PointTaskConfig(FrozenConfig):
    """Config of `sweep_point`."""

    point: dict[str, Value]
    grpo: GRPOTaskConfig
    num_iterations: int
    evaluation: EvaluationTaskConfig | None


class PointPlan(FrozenConfig):
    """The start of one point, and its own stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    point: PointTaskConfig

    @classmethod
    def of(cls, config: GRPORecipe, point: dict[str, Value]) -> "PointPlan":
        """Returns the plan of a point from its recipe and its values of the swept fields."""
        grpo = GRPOTaskConfig(**rollout_fields(config, grpo=config.grpo.iteration))
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
    """Config of `summarize_sweep`: the values of each point, in the order of the reports."""

    points: list[dict[str, Value]]
    confidence: float


class SweepPlan(FrozenConfig):
    """The settings of each stage."""

    points: list[PointPlan]
    concurrency: int
    min_success_ratio: float
    summary: SummaryTaskConfig
