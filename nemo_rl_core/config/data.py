"""Sources of rows, their maximum length, and the handling of rows that are too long."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.generated_data import (
    ArithmeticData,
    GuessNumberData,
    ReasoningGymData,
    SlidingPuzzleData,
)
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.config.row_policy import RowPolicy


class FileData(RowFormat, RowPolicy):
    """Rows from your files: jsonl, csv, parquet or arrow, a folder of these, or a folder that
    `datasets` saved; `s3://` and `gs://` name objects, folders and patterns.

    The columns determine the kind of rows; docs/data.md lists the supported ones.

    Attributes:
        train: The file, folder or address with rows to train on.
        validation: The file, folder or address with rows to validate on; None holds out
            `validation_fraction` of the training rows, drawn with the recipe's seed.
        validation_fraction: Fraction of the training rows that is held out if `validation` is None.
        max_prompt_tokens: Maximum length of a prompt, including the chat template.
    """

    kind: Literal["file"] = "file"
    train: str = Field(min_length=1)
    validation: str | None = Field(default=None, min_length=1)
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    max_prompt_tokens: PositiveInt = 512


class HubData(RowFormat, RowPolicy):
    """Rows from the Hugging Face hub.

    Attributes:
        name: Name of the data set, `organization/name`.
        subset: The configuration, if the data set has several.
        revision: A commit, tag or branch; None is the main branch. A run reads the commit that is
            current when the run begins.
        train: The split to train on.
        validation: The split to validate on; None holds out `validation_fraction` of the training
            split, drawn with the recipe's seed.
        validation_fraction: Fraction of the training split that is held out if `validation` is
            None.
        max_prompt_tokens: Maximum length of a prompt, including the chat template.
    """

    kind: Literal["hub"] = "hub"
    name: str = Field(min_length=1)
    subset: str | None = None
    revision: str | None = None
    train: str = Field(default="train", min_length=1)
    validation: str | None = None
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    max_prompt_tokens: PositiveInt = 512


class MixtureSource(FrozenConfig):
    """One source of a mixture.

    Attributes:
        data: Source of its rows; limits of rows belong to the mixture.
        weight: Weight of its training rows relative to the other sources. None in all sources takes
            every row once.
    """

    data: Annotated[
        ArithmeticData
        | ReasoningGymData
        | SlidingPuzzleData
        | GuessNumberData
        | FileData
        | HubData,
        Field(discriminator="kind"),
    ]
    weight: PositiveFloat | None = None

    @model_validator(mode="after")
    def _limits_of_the_mixture(self) -> "MixtureSource":
        limits = {*RowPolicy.model_fields, "max_prompt_tokens"}
        set_limits = sorted(
            name
            for name in self.data.model_fields_set & limits
            if getattr(self.data, name) != type(self.data).model_fields[name].default
        )
        if set_limits:
            raise ValueError(
                f"{', '.join(set_limits)} applies to all rows of a mixture: move it from the "
                "source to the mixture"
            )
        return self


class MixtureData(RowPolicy):
    """Rows from several sources, all of the same kind.

    Every source contributes training rows by its weight, and all its validation rows. The choice of
    rows depends only on the recipe's seed.

    Attributes:
        sources: The sources, each with its weight.
        num_train: Number of training rows from all sources together; None takes as many as the
            weights allow without repeating a row. More repeats rows, which needs
            `duplicates: keep`.
        max_prompt_tokens: Maximum length of a prompt, including the chat template.
    """

    kind: Literal["mixture"] = "mixture"
    sources: list[MixtureSource] = Field(min_length=1)
    num_train: PositiveInt | None = None
    max_prompt_tokens: PositiveInt = 512

    @model_validator(mode="after")
    def _all_weights_or_none(self) -> "MixtureData":
        has_weight = [each.weight is not None for each in self.sources]
        if any(has_weight) and not all(has_weight):
            missing = [str(index) for index, each in enumerate(has_weight) if not each]
            raise ValueError(
                f"sources {', '.join(missing)} have no weight, but others have one: set it for "
                "all, or for none to take every row once"
            )
        if self.num_train is not None and not any(has_weight):
            raise ValueError("num_train draws rows by weights: set one for every source")
        return self


DataConfig = Annotated[
    ArithmeticData
    | ReasoningGymData
    | SlidingPuzzleData
    | GuessNumberData
    | FileData
    | HubData
    | MixtureData,
    Field(discriminator="kind"),
]


def with_rows_to_train_on(data: Any) -> Any:
    """Sets a missing `train` to `validation`, for data of which only validation rows are read."""
    if not isinstance(data, dict):
        return data
    if isinstance(sources := data.get("sources"), list):
        completed = [
            {**each, "data": with_rows_to_train_on(each["data"])}
            if isinstance(each, dict) and "data" in each
            else each
            for each in sources
        ]
        return {**data, "sources": completed}
    if data.get("kind") in ("file", "hub") and data.get("validation"):
        return {"train": data["validation"], **data}
    return data


def source_of(data: DataConfig, part: str) -> str:
    """Returns the source of a split, for errors; "" if its rows are not from a file."""
    if not isinstance(data, FileData):
        return ""
    if data.validation is None:
        return f"the {part} part of {data.train}"
    return data.train if part == "train" else data.validation
