"""Mapping of the columns of data to prompts, conversations or pairs."""

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
    "tools",
    "mask",
    "max_tokens",
    "margin",
    "system",
    "history",
    "context",
    "input",
    "choices",
    "tests",
    "setup",
    "entry_point",
)
"""The supported columns; `columns` maps others to them."""

FormatName = Literal[
    "gsm8k",
    "math",
    "open_math_instruct",
    "verl",
    "rlvr",
    "problem_answer",
    "aime_2024",
    "question_answer",
    "question_solution",
    "final_answer",
    "input_output",
    "nemo_rl_preferences",
    "rejected_response",
    "rejected_messages",
    "squad",
    "alpaca",
    "sharegpt",
    "question_pairs",
    "dolly",
    "open_orca",
    "meta_math",
    "prompt_response",
    "arc",
    "open_book_qa",
    "aqua_rat",
    "labelled_options",
    "agieval",
    "hellaswag",
    "piqa",
    "social_iqa",
    "winogrande",
    "copa",
    "medmcqa",
    "logiqa",
    "reclor",
    "sciq",
    "gpqa",
    "truthful_qa_choices",
    "truthful_qa",
    "boolq",
    "drop",
    "answer_spellings",
    "web_questions",
    "pubmed_qa",
    "mgsm",
    "svamp",
    "input_target",
    "chosen_response",
    "stack_exchange_paired",
    "shp",
    "safe_rlhf",
    "helpsteer2",
    "helpsteer3",
    "arena",
    "arena_55k",
    "ultrafeedback",
    "nectar",
    "webgpt",
    "summaries",
    "preferred_output",
    "mbpp",
    "human_eval",
    "apps",
    "code_contests",
    "kod_code",
    "prime_code",
    "live_code_bench",
    "deep_coder",
    "big_code_bench",
    "odex",
]
"""Names of the published formats that are recognized."""


class RowFormat(FrozenConfig):
    """How the columns of rows are read.

    Attributes:
        columns: Supported column (`prompt`, `answer` and so on) by the column's name in the data. A
            path with dots names a nested column: `reward_model.ground_truth`.
        answer_pattern: Pattern that extracts the answer from a longer text: `hashes` takes the text
            after the last `####`, `boxed` the contents of the last LaTeX boxes, and a regular
            expression with one group its last match. None takes the full text.
        format: Published format of the columns; None detects it.
        system_prompt: System turn before every prompt or conversation; None adds none.
        prompt_template: Text of a prompt with columns in braces, such as `{prompt}` or
            `{extra_info.level}`. Double braces escape single ones: `{{x}}` is `{x}`.
        drop_columns: Columns to ignore, such as `images` or `tools`, which are otherwise refused.
        task: Task of rows without a column `task`; None takes the name of the source.
        max_rows: Maximum number of rows to read from each file, folder or split; None reads all.
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
            raise ValueError("rename is the earlier name of columns: set only columns")
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
                        "data.columns maps to a column that is not supported:",
                        unknown,
                        KNOWN_COLUMNS,
                        otherwise="write {YOUR_COLUMN: prompt}: the data's column comes first"
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
            raise ValueError(f"answer_pattern is not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(
                f"answer_pattern has {groups} groups, but exactly one must match the answer; write "
                r"'hashes' for the text after ####, 'boxed' for \boxed{...}, or a pattern such as "
                r"'Answer: (\S+)', with (?:...) around other groups"
            )
        return pattern

    @model_validator(mode="after")
    def _one_way(self) -> "RowFormat":
        if self.format is not None and self.columns:
            raise ValueError(
                f"format {self.format!r} and columns both define the columns: set only one"
            )
        return self

    @classmethod
    def of(cls, values: Mapping[str, Any], *, other_names: Sequence[str] = ()) -> "RowFormat":
        """Returns the format for options by name; `other_names` are only suggested."""
        unknown = sorted(set(values) - cls.accepted_keys())
        if unknown:
            raise unknown_names(
                "there is no option",
                unknown,
                sorted({*cls.model_fields, *other_names}),
                otherwise="choose one of them",
            )
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise describe(error, values) from None

    def reading(self) -> "RowFormat":
        """Returns only these fields of a data config."""
        return RowFormat(**{name: getattr(self, name) for name in RowFormat.model_fields})
