"""How the columns of a user's data become prompts, conversations or pairs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.names import unknown_names

KNOWN_COLUMNS: Final = (
    "prompt",
    "answer",
    "completion",
    "messages",
    "chosen",
    "rejected",
    "responses",
    "scores",
    "text",
    "id",
    "task",
    "metadata",
    "mask",
    "max_tokens",
    "margin",
)
"""The columns that are understood; `columns` maps others to them."""

FormatName = Literal[
    "gsm8k",
    "math",
    "open_math_instruct",
    "verl",
    "problem_answer",
    "aime_2024",
    "question_answer",
    "helpsteer3",
    "squad",
    "alpaca",
    "sharegpt",
]
"""The published formats that are recognised, by name."""


class RowFormat(FrozenConfig):
    """How the columns of rows are read.

    Attributes:
        columns: The column that is understood (`prompt`, `answer` and so on), by the column's name
            in the data. A path with dots reaches into nested columns: `reward_model.ground_truth`.
        answer_pattern: Takes the answer out of a longer text: `hashes` is what follows the last
            `####`, `boxed` the contents of the last LaTeX boxes, anything else a regular expression
            with one group, of which the last match counts. None takes the text as it is.
        format: The published format that the columns have; None recognises it.
        system_prompt: A system turn before every prompt or conversation; None adds none.
        prompt_template: The text of a prompt, with columns in braces, such as `{prompt}` or
            `{extra_info.level}`. Two braces on each side write one: `{{x}}` is `{x}`.
        drop_columns: Columns that are left out, such as `images` or `tools`, which are refused
            otherwise.
        task: The task of rows without a column `task`; None takes the name of the source.
        max_rows: The first so many rows of each file, folder or split; what follows them is not
            read. None reads all.
        rename: The earlier name of `columns`.
    """

    shorthands: ClassVar[frozenset[str]] = frozenset({"rename"})

    columns: dict[str, str] = Field(default_factory=dict)
    answer_pattern: str | None = Field(default=None, min_length=1)
    format: FormatName | None = None
    system_prompt: str | None = Field(default=None, min_length=1)
    prompt_template: str | None = Field(default=None, min_length=1)
    drop_columns: list[str] = Field(default_factory=list)
    task: str | None = Field(default=None, min_length=1)
    max_rows: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _columns_of_rename(cls, values: Any) -> Any:
        # `rename` is the earlier name of `columns`; recipes that have it keep working.
        if not isinstance(values, Mapping) or "rename" not in values:
            return values
        if "columns" in values:
            raise ValueError("rename is the earlier name of columns: give columns alone")
        return {("columns" if key == "rename" else key): value for key, value in values.items()}

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, columns: dict[str, str]) -> dict[str, str]:
        unknown = [target for target in columns.values() if target not in KNOWN_COLUMNS]
        if unknown:
            reversed_ = [source for source in columns if source in KNOWN_COLUMNS]
            raise ValueError(
                str(
                    unknown_names(
                        "data.columns maps to a column that is not understood:",
                        unknown,
                        KNOWN_COLUMNS,
                        otherwise="write {YOUR_COLUMN: prompt}: the data's column stands first"
                        if reversed_
                        else "choose one of them",
                    )
                )
            )
        twice = sorted({name for name in columns.values() if [*columns.values()].count(name) > 1})
        if twice:
            raise ValueError(f"data.columns maps several columns to {', '.join(twice)}")
        return columns

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        if pattern is None or pattern in ("hashes", "boxed"):
            return pattern
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"answer_pattern is no regular expression: {error}") from None
        if groups != 1:
            raise ValueError(
                f"answer_pattern has {groups} groups where one marks the answer; write 'hashes' "
                r"for what follows ####, 'boxed' for \boxed{...}, or a pattern such as "
                r"'Answer: (\S+)', with (?:...) around parts that are no answer"
            )
        return pattern

    @model_validator(mode="after")
    def _one_way(self) -> "RowFormat":
        if self.format is not None and self.columns:
            raise ValueError(
                f"format {self.format!r} and columns both say what the columns mean: give one"
            )
        return self

    @classmethod
    def of(cls, values: Mapping[str, Any], *, beside: Sequence[str] = ()) -> "RowFormat":
        """The options that a caller gave by name.

        Args:
            values: The options.
            beside: Other names that the caller takes, one of which may have been meant.

        Raises:
            ConfigError: For unknown or contradictory ones.
        """
        unknown = sorted(set(values) - cls.accepted_keys())
        if unknown:
            raise unknown_names(
                "there is no option",
                unknown,
                sorted({*cls.model_fields, *beside}),
                otherwise="choose one of them",
            )
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise describe(error, values) from None

    def reading(self) -> "RowFormat":
        """This part of a data config alone."""
        return RowFormat(**{name: getattr(self, name) for name in RowFormat.model_fields})
