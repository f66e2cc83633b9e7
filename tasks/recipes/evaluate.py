"""The recipe of an evaluation: one model measured, or two on the same prompts."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.data import with_rows_to_train_on
from nemo_rl_core.config.model import ModelConfig, PretrainedModel
from nemo_rl_core.config.training import Head
from nemo_rl_core.errors import ConfigError
from tasks.recipes.common import (
    EvaluationTaskConfig,
    ModelTaskConfig,
    PipelineRecipe,
)


class EvaluateRecipe(PipelineRecipe):
    """Recipe of an evaluation of `model` on the validation rows of `data` with `environment`.

    A model's name may be a folder in the transformers layout, a name on the hub, or the folder of
    an artifact that a run left in the store. Files and hub data need no rows to train on:
    `data: {kind: file, validation: test.jsonl}`, `data: {kind: hub, name: …, validation: test}`.

    Attributes:
        baseline: A second model to compare with, on the same prompts.
    """

    baseline: ModelConfig | None = None

    @property
    def trained_heads(self) -> list[Head]:
        """Empty."""
        return []

    @property
    def models(self) -> list[ModelConfig]:
        """Models that must exist before a run begins."""
        return [self.model] if self.baseline is None else [self.model, self.baseline]

    @field_validator("model", "baseline")
    @classmethod
    def _resolve_artifacts(cls, model: ModelConfig | None) -> ModelConfig | None:
        """Resolves artifacts here, not in a stage: checks before a run read the folder."""
        if isinstance(model, PretrainedModel):
            model_folder = Path(model.name).expanduser() / "model"
            if (model_folder / "config.json").is_file():
                return model.replace(name=str(model_folder))
        return model

    @field_validator("data", mode="before")
    @classmethod
    def _train_rows_by_default(cls, data: Any) -> Any:
        """Evaluates the validation rows, or the rows of `train` if no others are named."""
        if isinstance(data, dict) and data.get("kind") in ("file", "hub"):
            source_name = data.get("validation") or data.get("train")
            return (
                {**data, "train": source_name, "validation": source_name} if source_name else data
            )
        return with_rows_to_train_on(data)

    @model_validator(mode="after")
    def _evaluates(self) -> Self:
        if self.evaluation is None:
            raise ConfigError(
                "this recipe only evaluates",
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
    """Config of `compare`."""

    confidence: float = Field(gt=0.5, lt=1)


class BaselineTaskConfig(FrozenConfig):
    """Config of the second half of a comparison; without `model` nothing is compared."""

    model: ModelTaskConfig | None
    evaluation: EvaluationTaskConfig
    comparison: ComparisonTaskConfig
