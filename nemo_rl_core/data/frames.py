"""Pandera schemas of training rows, by kind, and the faults of a frame under its schema.

A table is checked when it is written and when it is read, since the file may have changed or come
from another program. Checks of contents, which need the tokenizer, are in `checks.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import pandera.pandas as pa
from pandera.errors import SchemaErrors
from pandera.typing import Series

from nemo_rl_core.config.row_policy import MAX_DROPPED
from nemo_rl_core.data.record_frames import (
    ReferenceLogprobSchema,
    TokenPairSchema,
    check_each,
    has_text,
    is_json_object,
)
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

Faults = dict[str, list[int]]
"""Row indices, counted from 0, by fault."""


def records_of(frame: pd.DataFrame) -> list[Row]:
    """Returns the rows of a frame as dicts; faster than `to_dict`."""
    names = [str(column) for column in frame.columns]
    columns = [frame[column].tolist() for column in frame.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


class RowSchema(pa.DataFrameModel):
    """Columns of every data set row.

    The checks have no names, since pandera 0.35 gives them only to the first subclass; `_MESSAGES`
    maps the names of their methods to messages.
    """

    id: Series[str]
    task: Series[str]
    metadata: Series[str]
    tools: Series[str] | None

    @pa.check("id")
    def _unique(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805 (pandera binds the class)
        return ~column.duplicated()

    @pa.check("metadata")
    def _json(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return check_each(column, is_json_object)


class PromptSchema(RowSchema):
    """A row that can be sampled from and scored."""

    prompt: Series[str]
    answer: Series[str]
    completion: Series[str]

    @pa.check("prompt")
    def _not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return has_text(column)

    @pa.check("answer")
    def _empty_in_all_or_none(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        # Either all rows have answers, or none.
        return has_text(column) if column.any() else column == ""


class SftSchema(PromptSchema):
    """A row that can also be trained on with supervision."""

    @pa.check("completion")
    def _completion_not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return has_text(column) if column.any() else column == ""


class ConversationSchema(RowSchema):
    """A conversation to train on: `messages` is the JSON of its turns."""

    messages: Series[str]
    mask: Series[str] = pa.Field(isin=("all_assistant_turns", "final_turn"))


class TextSchema(RowSchema):
    """A text to train on, from start to end."""

    text: Series[str]

    @pa.check("text")
    def _not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return has_text(column)


class PreferenceSchema(RowSchema):
    """Two answers to one prompt, each a text or the JSON of turns.

    `margin`, if present, is the difference between chosen and rejected in units of a reward
    model's scores.
    """

    prompt: Series[str]
    chosen: Series[str]
    rejected: Series[str]
    margin: Series[float] | None = pa.Field(coerce=True, ge=0, lt=float("inf"))

    @pa.check("prompt", "chosen", "rejected")
    def _not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return has_text(column)


Schema = type[pa.DataFrameModel]

RowKind = Literal["prompts", "conversations", "text", "preferences"]
"""Kind of a row; `row_kind` derives it from the columns."""

SCHEMAS: dict[RowKind, Schema] = {
    "prompts": PromptSchema,
    "conversations": ConversationSchema,
    "text": TextSchema,
    "preferences": PreferenceSchema,
}
"""Schema of each kind of rows."""


def row_kind(columns: Mapping[str, Any] | Sequence[str]) -> RowKind:
    """Returns the kind of rows with these columns; prompts if no other kind fits.

    Example:
        >>> row_kind(["id", "prompt", "chosen", "rejected"])
        'preferences'
    """
    if "chosen" in columns:
        return "preferences"
    if "messages" in columns:
        return "conversations"
    return "text" if "text" in columns else "prompts"


def schema_of(columns: Sequence[str]) -> Schema:
    """Returns the schema of a data set folder's table with these columns.

    Example:
        >>> schema_of(["id", "chosen", "rejected"]).__name__
        'ReferenceLogprobSchema'
    """
    if "chosen_token_ids" in columns:
        return TokenPairSchema
    if "chosen" in columns and "prompt" not in columns:
        return ReferenceLogprobSchema
    return SCHEMAS[row_kind(columns)]


_NUM_NAMED_ROWS = 5
_NUM_NAMED_CHECKS = 6
_NUM_SUMMARIZED = 6


def check_frame(schema: Schema, frame: pd.DataFrame, *, name: str) -> None:
    """Raises if a table does not match a schema.

    Args:
        schema: A schema of `frames` or `record_frames`.
        frame: The table, which is not modified.
        name: Name of the table in messages.

    Raises:
        DataError: Names the rows (counted from 0) and the checks that they fail.
    """
    if faults := schema_faults(schema, frame):
        raise describe_faults(faults, name)


_MESSAGES = {
    "column_in_dataframe": "is missing from every row",
    "not_nullable": "is missing or null",
    "_unique": "occurs twice",
    "_not_empty": "is empty",
    "_empty_in_all_or_none": "is empty",
    "_completion_not_empty": "is empty",
    "_json": "is not a JSON object (data.drop_columns removes a column)",
    "_tokens": "is not a list of token ids",
    "_trained": "has no trained token",
    "_logprobs": "is not a list of finite logprobs",
    "_finite": "is not finite",
    "_numbers_or_nan": "is not a list of numbers, or nan for a reward that does not apply",
    "_finite_list": "is not a list of finite numbers",
    "_text_or_null": "is neither text nor null",
    "_verdict": "is neither true, false nor null",
}
_FRAME_MESSAGES = {
    "_masks_fit": "a loss mask is not as long as its tokens",
    "_one_per_token": "logprobs, generated or weight_versions do not have one value per token",
    "_once": "a prompt has one sample of a mode twice",
}


def schema_faults(schema: Schema, frame: pd.DataFrame) -> Faults:
    """Returns the faults of a table under a schema; empty if it is valid."""
    required = [name for name, column in schema.to_schema().columns.items() if column.required]
    missing = [name for name in required if name not in frame.columns]
    if missing:  # checks of several columns would raise other errors
        return {f"{name} is missing from every row": [] for name in missing}
    try:
        schema.validate(frame, lazy=True)
    except SchemaErrors as error:
        return _faults_of(error)
    return {}


def _faults_of(error: SchemaErrors) -> Faults:
    cases = error.failure_cases
    faults: Faults = {}
    for column, check, case, index in zip(
        cases["column"], cases["check"], cases["failure_case"], cases["index"], strict=True
    ):
        rows = faults.setdefault(_fault_message(str(column), str(check), case), [])
        if pd.notna(index) and int(index) not in rows:
            rows.append(int(index))
    return faults


def _fault_message(column: str, check: str, case: Any) -> str:
    if check in _FRAME_MESSAGES:
        return _FRAME_MESSAGES[check]
    subject = case if check == "column_in_dataframe" else column
    if check.startswith(("dtype", "coerce_dtype")):
        is_text = "str" in check
        return f"{subject} is not text" if is_text else f"{subject} is of another type: {check}"
    return f"{subject} {_MESSAGES.get(check, check)}"


def describe_faults(
    faults: Faults, name: str, *, source: str = "", fix: str | None = None, otherwise: str = ""
) -> DataError:
    """Returns an error that names the invalid rows of the table `name` and their faults.

    Args:
        fix: The fix; by default to change the rows.
        otherwise: Alternative that is appended to the default fix.
    """
    lines = [
        text + (f": rows {numbers(sorted(rows))}" if rows else "")
        for text, rows in list(faults.items())[:_NUM_NAMED_CHECKS]
    ]
    count = f"{len(faults)} checks" if len(faults) > 1 else "a check"
    more = f", of which the first {len(lines)} are" if len(faults) > len(lines) else ""
    return DataError(
        f"the {name} data set fails {count}{more}:\n    " + "\n    ".join(lines),
        fix=fix
        or f"correct or remove these rows{f' of {source}' if source else ''} (counted from 0)"
        f"{otherwise}",
    )


def numbers(rows: Sequence[int]) -> str:
    """Formats row numbers: the first ones, and the number of others."""
    listed = ", ".join(str(row) for row in rows[:_NUM_NAMED_ROWS])
    hidden = len(rows) - _NUM_NAMED_ROWS
    return f"{listed} and {hidden} more" if hidden > 0 else listed


def summarize_faults(faults: Mapping[str, Sequence[int]]) -> str:
    """Returns the most frequent faults with their numbers of rows."""
    ordered = sorted(faults.items(), key=lambda fault: -len(fault[1]))
    texts = [f"{len(rows)} {text}" for text, rows in ordered[:_NUM_SUMMARIZED]]
    return "; ".join(texts) + ("; and others" if len(ordered) > _NUM_SUMMARIZED else "")


def invalid_fix(fix: str, *, drops: bool) -> str:
    """Appends the option that drops rows, or its limit, to a fix for rows that do not fit."""
    limit = f"{MAX_DROPPED * 100:.0f} %"
    if drops:
        return f"{fix} (data.invalid: drop allows at most {limit})"
    return f"{fix}, or drop up to {limit} of the rows: data.invalid: drop"
