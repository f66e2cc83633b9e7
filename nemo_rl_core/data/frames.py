"""Pandera schemas of training rows, by kind.

A table is checked when it is written and when it is read, since the file may have changed or come
from another program. Checks of contents, which need the tokenizer, are in `checks.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import pandera.pandas as pa
from pandera.typing import Series

from nemo_rl_core.data.record_frames import (
    ReferenceLogprobSchema,
    TokenPairSchema,
    check_each,
    has_text,
    is_json_object,
)
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
