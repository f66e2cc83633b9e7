"""The recipe of an evaluation: one model measured, or two on the same prompts."""

from pathlib import Path
from typing import Any, NamedTuple, Self

from flytekit.types.error.error import FlyteError
from pydantic import Field, field_validator, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.data import with_rows_to_train_on
from nemo_rl_core.config.model import ModelConfig, PretrainedModel
from nemo_rl_core.config.training import Head
from nemo_rl_core.errors import ConfigError
from tasks.platform.failures import failure_handler, leave_record
from tasks.platform.stage import plan_task
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    PipelineRecipe,
)
from tasks.recipes.verdict import QuestionsTaskConfig


class EvaluateRecipe(PipelineRecipe):
    """All of an evaluation: `model` on the validation rows of `data`, as `environment` scores.

    A model's name may be a folder in the transformers layout, a name on the hub, or the folder of
    an artifact that a run left in the store. Data from a file or the hub need no rows to train on:
    `data: {kind: file, validation: test.jsonl}`, `data: {kind: hub, name: …, validation: test}`.

    Attributes:
        baseline: A second model to compare with, on the same prompts.
    """

    baseline: ModelConfig | None = None

    @property
    def trained_heads(self) -> list[Head]:
        """None."""
        return []

    @property
    def models(self) -> list[ModelConfig]:
        """Every model that must be there before a run begins."""
        return [self.model] if self.baseline is None else [self.model, self.baseline]

    @field_validator("model", "baseline")
    @classmethod
    def _of_an_artifact(cls, model: ModelConfig | None) -> ModelConfig | None:
        """Looked up here, not in a stage: the checks before a run read the folder already."""
        if isinstance(model, PretrainedModel):
            inner = Path(model.name).expanduser() / "model"
            if (inner / "config.json").is_file():
                return model.replace(name=str(inner))
        return model

    @field_validator("data", mode="before")
    @classmethod
    def _without_rows_to_train_on(cls, data: Any) -> Any:
        """Asks the validation rows, or the rows of `train` if no others are named."""
        if isinstance(data, dict) and data.get("kind") in ("file", "hub"):
            named = data.get("validation") or data.get("train")
            return {**data, "train": named, "validation": named} if named else data
        return with_rows_to_train_on(data)

    @model_validator(mode="after")
    def _evaluates(self) -> Self:
        if self.evaluation is None:
            raise ConfigError(
                "this recipe does nothing but evaluate",
                expected="a section evaluation",
                got="evaluation: null",
                fix="leave evaluation out of the recipe",
            )
        return self


class RegressionRecipe(EvaluateRecipe):
    """Recipe of a regression check: an evaluation with a required baseline."""

    @model_validator(mode="after")
    def _has_a_baseline(self) -> Self:
        if self.baseline is None:
            raise ConfigError(
                "a regression check needs a model to compare with",
                expected="baseline: the model that must not be better",
                got="a recipe without a baseline",
                fix="name one, as in baseline: {name: FOLDER}",
            )
        return self


class ComparisonTaskConfig(FrozenConfig):
    """What `compare` reads."""

    confidence: float = Field(gt=0.5, lt=1)


class BaselineTaskConfig(FrozenConfig):
    """What the second half of a comparison reads; without `model` there is nothing to compare."""

    model: ModelTaskConfig | None
    evaluation: EvaluationTaskConfig
    comparison: ComparisonTaskConfig


class EvaluatePlan(NamedTuple):
    """The settings of each stage."""

    model: ModelTaskConfig
    questions: QuestionsTaskConfig
    evaluation: EvaluationTaskConfig
    baseline: BaselineTaskConfig


@plan_task
def plan_evaluate(config: EvaluateRecipe) -> EvaluatePlan:
    """Deals the recipe out to the stages."""
    evaluation = EvaluationTaskConfig.of(config)
    assert evaluation is not None, "the recipe refuses to switch evaluation off"
    asked = config.replace(data=config.question_data)
    baseline = None
    if config.baseline is not None:
        baseline = ModelTaskConfig.of(config.replace(model=config.baseline))
    return EvaluatePlan(
        model=ModelTaskConfig.of(config),
        questions=QuestionsTaskConfig(questions=DataTaskConfig.of(asked)),
        evaluation=evaluation,
        baseline=BaselineTaskConfig(
            model=baseline,
            evaluation=evaluation,
            comparison=ComparisonTaskConfig(confidence=evaluation.evaluation.confidence),
        ),
    )


@failure_handler
def record_failure(config: EvaluateRecipe, err: FlyteError | None = None) -> None:
    """After `workflows/evaluate.py`."""
    leave_record("evaluate", "evaluate_model", config, err)


@failure_handler
def record_refusal(config: RegressionRecipe, err: FlyteError | None = None) -> None:
    """After `workflows/regression.py`; also where it did its work and refused the model."""
    leave_record("regression", "check_regression", config, err)
