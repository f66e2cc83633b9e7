"""Where rows come from, how long they may be, and what happens to those that are too long."""

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
    """Rows of your own: jsonl, csv, parquet or arrow, a folder of one of these, or a folder that
    `datasets` saved; `s3://` and `gs://` name objects, folders of them and patterns.

    The columns say what the rows are; docs/data.md lists what is understood.

    Attributes:
        train: The file, folder or address with rows to train on.
        validation: The file, folder or address with rows to validate on; None holds out
            `validation_fraction` of the training rows, drawn with the recipe's seed.
        validation_fraction: The share of the training rows that is held out where `validation` is
            None.
        max_prompt_tokens: The longest prompt, chat template included.
    """

    kind: Literal["file"] = "file"
    train: str = Field(min_length=1)
    validation: str | None = Field(default=None, min_length=1)
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    max_prompt_tokens: PositiveInt = 512


class HubData(RowFormat, RowPolicy):
    """Rows from the Hugging Face hub.

    Attributes:
        name: As `organization/name`.
        subset: The configuration, where the data set has several.
        revision: A commit, tag or branch; None is the main branch. A run reads the commit that it
            is when the run begins.
        train: The split to train on.
        validation: The split to validate on; None holds out `validation_fraction` of the training
            split, drawn with the recipe's seed.
        validation_fraction: The share of the training split that is held out where `validation` is
            None.
        max_prompt_tokens: The longest prompt, chat template included.
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
        data: Where its rows come from; limits of rows belong to the mixture.
        weight: Its share of the rows to train on, relative to the other sources. None in all
            sources takes every row once.
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
        inside = sorted(
            name
            for name in self.data.model_fields_set & limits
            if getattr(self.data, name) != type(self.data).model_fields[name].default
        )
        if inside:
            raise ValueError(
                f"{', '.join(inside)} holds for all rows of a mixture: move it from the source to "
                "the mixture"
            )
        return self


class MixtureData(RowPolicy):
    """Rows of several sources, all of one kind.

    Every source gives its training rows by its weight and all its validation rows. Which rows are
    taken depends on the recipe's seed alone.

    Attributes:
        sources: The sources, each with its weight.
        num_train: Rows to train on, of all sources together; None takes as many as the weights
            allow without a row twice. More than that repeats rows, which needs `duplicates: keep`.
        max_prompt_tokens: The longest prompt, chat template included.
    """

    kind: Literal["mixture"] = "mixture"
    sources: list[MixtureSource] = Field(min_length=1)
    num_train: PositiveInt | None = None
    max_prompt_tokens: PositiveInt = 512

    @model_validator(mode="after")
    def _all_weights_or_none(self) -> "MixtureData":
        given = [each.weight is not None for each in self.sources]
        if any(given) and not all(given):
            missing = [str(index) for index, each in enumerate(given) if not each]
            raise ValueError(
                f"sources {', '.join(missing)} have no weight and others have: give one to all, "
                "or to none to take every row once"
            )
        if self.num_train is not None and not any(given):
            raise ValueError("num_train draws rows by weights: give one to every source")
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
    """Completes a data section that names only rows to ask questions from, and never trains.

    Args:
        data: The section as written; anything but a map is returned as it is.

    Returns:
        A copy whose `train`, where it is not named, is the same as `validation`, also in the
        sources of a mixture.
    """
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
    """The file that the rows of a part are counted in; empty for rows that are from no file."""
    if not isinstance(data, FileData):
        return ""
    if data.validation is None:
        return f"the {part} part of {data.train}"
    return data.train if part == "train" else data.validation
