"""Pandera schemas of all tables that stages exchange; faults name their rows.

A table is checked when it is written and when it is read, since the file may have changed or come
from elsewhere. Checks of contents (roles, lengths, trained tokens) need the tokenizer and are in
`checks.py`.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import pandera.pandas as pa
from pandera.errors import SchemaErrors
from pandera.typing import Series

from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

Faults = dict[str, list[int]]
"""Row indices, counted from 0, by fault."""

_NUM_NAMED_ROWS = 5
_NUM_NAMED_CHECKS = 6


def is_json_object(text: Any) -> bool:
    """Whether a value is the text of a JSON object."""
    if isinstance(text, str) and text == "{}":
        return True
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False


def _has_text(column: "Series[str]") -> "pd.Series[bool]":
    # Values that are not text pass: the check of the column's type reports them.
    return _each(column, lambda value: not isinstance(value, str) or bool(value.strip()))


def _each(column: Any, holds: Callable[[Any], bool]) -> "pd.Series[bool]":
    """Applies a check value by value, for columns of lists, which have no pandas type."""
    values = column.tolist()  # one by one, a column of strings makes each value anew
    return pd.Series([bool(holds(value)) for value in values], index=column.index, dtype=bool)


def records_of(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame by the names of their columns; faster than `to_dict`."""
    names = [str(column) for column in frame.columns]
    columns = [frame[column].tolist() for column in frame.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _is_text_or_null(value: Any) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)
    return isinstance(value, str) or value is None or is_nan


def _is_list(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def _is_finite_list(value: Any) -> bool:
    return _is_list(value) and all(math.isfinite(item) for item in value)


def _is_token_list(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and all(item >= 0 for item in value)


class RowSchema(pa.DataFrameModel):
    """The columns of every data set row.

    The checks have no names, as pandera 0.35 gives those to the first subclass alone; `_MESSAGES`
    maps the names of their methods to messages.
    """

    id: Series[str]
    task: Series[str]
    metadata: Series[str]

    @pa.check("id")
    def _unique(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805 (pandera binds the class)
        return ~column.duplicated()

    @pa.check("metadata")
    def _json(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return _each(column, is_json_object)


class PromptSchema(RowSchema):
    """A row that can be sampled from and scored."""

    prompt: Series[str]
    answer: Series[str]
    completion: Series[str]

    @pa.check("prompt")
    def _not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return _has_text(column)

    @pa.check("answer")
    def _empty_in_all_or_none(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        # A data set without answers is whole; one that lacks some of them is not.
        return _has_text(column) if column.any() else column == ""


class SftSchema(PromptSchema):
    """A row that can also be trained on with supervision."""

    @pa.check("completion")
    def _completion_not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return _has_text(column) if column.any() else column == ""


class ConversationSchema(RowSchema):
    """A conversation to train on: `messages` is the JSON of its turns."""

    messages: Series[str]
    mask: Series[str] = pa.Field(isin=("all_assistant_turns", "final_turn"))


class TextSchema(RowSchema):
    """A text to train on whole."""

    text: Series[str]

    @pa.check("text")
    def _not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return _has_text(column)


class PreferenceSchema(RowSchema):
    """Two answers to one prompt, each a text or the JSON of turns.

    `margin`, where given, is by how much the chosen answer is better, in the units of the scores
    of a reward model.
    """

    prompt: Series[str]
    chosen: Series[str]
    rejected: Series[str]
    margin: Series[float] | None = pa.Field(coerce=True, ge=0, lt=float("inf"))

    @pa.check("prompt", "chosen", "rejected")
    def _not_empty(cls, column: Series[str]) -> "pd.Series[bool]":  # noqa: N805
        return _has_text(column)


class TokenPairSchema(pa.DataFrameModel):
    """A preference pair as token ids with loss masks."""

    id: Series[str]
    chosen_token_ids: Series[Any]
    chosen_loss_mask: Series[Any]
    rejected_token_ids: Series[Any]
    rejected_loss_mask: Series[Any]
    margin: Series[float] = pa.Field(ge=0, lt=float("inf"))

    @pa.check("chosen_token_ids", "rejected_token_ids")
    def _tokens(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return _each(column, _is_token_list)

    @pa.check("chosen_loss_mask", "rejected_loss_mask")
    def _trained(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return _each(column, lambda mask: _is_list(mask) and any(mask))

    @pa.dataframe_check
    @classmethod
    def _masks_fit(cls, frame: pd.DataFrame) -> "pd.Series[bool]":
        return _same_lengths(frame, "chosen_token_ids", "chosen_loss_mask") & _same_lengths(
            frame, "rejected_token_ids", "rejected_loss_mask"
        )


class ReferenceLogprobSchema(pa.DataFrameModel):
    """Logprobs of a pair under the reference policy: one per trained token, in nats."""

    id: Series[str]
    chosen: Series[Any]
    rejected: Series[Any]

    @pa.check("chosen", "rejected")
    def _logprobs(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return _each(column, lambda each: _is_finite_list(each) and len(each) > 0)


class RolloutSchema(pa.DataFrameModel):
    """A completion with its score.

    `logprobs`, `generated` and `weight_versions` have one value per token. A rollout that
    could not be scored has an `error` and no reward.
    """

    prompt_id: Series[str]
    group: Series[int] = pa.Field(ge=0)
    sample: Series[int] = pa.Field(ge=0)
    task: Series[str]
    prompt: Series[str]
    completion: Series[str]
    answer: Series[str]
    reward: Series[float] = pa.Field(nullable=True, coerce=True)
    advantage: Series[float] = pa.Field(nullable=True, coerce=True)
    truncated: Series[bool]
    error: Series[Any] = pa.Field(nullable=True)
    turn_rewards: Series[Any]
    components: Series[Any]
    messages: Series[Any]
    metadata: Series[str]
    prompt_ids: Series[Any]
    completion_ids: Series[Any]
    logprobs: Series[Any]
    generated: Series[Any]
    weight_versions: Series[Any]
    num_unread_tokens: Series[int] = pa.Field(ge=0)

    @pa.check("reward", "advantage")
    def _finite(cls, column: Series[float]) -> "pd.Series[bool]":  # noqa: N805
        return _each(column, lambda value: not math.isinf(value))

    @pa.check("error")
    def _text_or_null(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return _each(column, _is_text_or_null)

    @pa.check("components")
    def _numbers_or_nan(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return _each(column, lambda value: _is_list(value) and not any(map(math.isinf, value)))

    @pa.check("turn_rewards", "logprobs")
    def _finite_list(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return _each(column, _is_finite_list)

    @pa.dataframe_check
    @classmethod
    def _one_a_token(cls, frame: pd.DataFrame) -> "pd.Series[bool]":
        fits = _same_lengths(frame, "completion_ids", "logprobs")
        for name in ("generated", "weight_versions"):
            given = _each(frame[name], lambda value: len(value) > 0)
            fits &= ~given | _same_lengths(frame, "completion_ids", name)
        return fits


class EvalSchema(pa.DataFrameModel):
    """A completion of an evaluation with its score."""

    prompt_id: Series[str]
    mode: Series[str] = pa.Field(isin=("greedy", "sampled"))
    sample: Series[int] = pa.Field(ge=0)
    category: Series[str]
    prompt: Series[str]
    completion: Series[str]
    answer: Series[str]
    extracted: Series[Any] = pa.Field(nullable=True)
    reward: Series[float] = pa.Field(nullable=True, coerce=True)
    correct: Series[Any] = pa.Field(nullable=True)
    truncated: Series[bool]
    error: Series[Any] = pa.Field(nullable=True)

    @pa.check("correct")
    def _verdict(cls, column: Series[Any]) -> "pd.Series[bool]":  # noqa: N805
        return _each(column, lambda value: value is None or value in (True, False))

    @pa.dataframe_check
    @classmethod
    def _once(cls, frame: pd.DataFrame) -> "pd.Series[bool]":
        return ~frame.duplicated(["prompt_id", "mode", "sample"])


class PairEvalSchema(pa.DataFrameModel):
    """A preference pair with the scores of a reward model."""

    id: Series[str]
    chosen: Series[str]
    rejected: Series[str]
    chosen_score: Series[float] = pa.Field(gt=-float("inf"), lt=float("inf"))
    rejected_score: Series[float] = pa.Field(gt=-float("inf"), lt=float("inf"))


Schema = type[pa.DataFrameModel]

RowKind = Literal["prompts", "conversations", "text", "preferences"]
"""The kind of a row; `row_kind` finds it from the columns."""

_BY_KIND: dict[RowKind, Schema] = {
    "prompts": PromptSchema,
    "conversations": ConversationSchema,
    "text": TextSchema,
    "preferences": PreferenceSchema,
}


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
    return _BY_KIND[row_kind(columns)]


def check_frame(schema: Schema, frame: pd.DataFrame, *, name: str) -> None:
    """Raises if a table does not match a schema.

    Args:
        schema: A schema of this module.
        frame: Not changed.
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
    "_json": "is not a JSON object",
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
    "_one_a_token": "logprobs, generated or weight_versions are not one a token",
    "_once": "a prompt has one sample of a mode twice",
}


def schema_faults(schema: Schema, frame: pd.DataFrame) -> Faults:
    """Returns the faults of a table under a schema; empty if it is valid."""
    missing = [name for name in _required(schema) if name not in frame.columns]
    if missing:  # checks of several columns would fail with errors of their own
        return {f"{name} is missing from every row": [] for name in missing}
    try:
        schema.validate(frame, lazy=True)
    except SchemaErrors as error:
        return _faults_of(error)
    return {}


def _required(schema: Schema) -> list[str]:
    return [name for name, column in schema.to_schema().columns.items() if column.required]


def _faults_of(error: SchemaErrors) -> Faults:
    cases = error.failure_cases
    found: Faults = {}
    for column, check, case, index in zip(
        cases["column"], cases["check"], cases["failure_case"], cases["index"], strict=True
    ):
        rows = found.setdefault(_fault_message(str(column), str(check), case), [])
        if pd.notna(index) and int(index) not in rows:
            rows.append(int(index))
    return found


def _fault_message(column: str, check: str, case: Any) -> str:
    if check in _FRAME_MESSAGES:
        return _FRAME_MESSAGES[check]
    subject = case if check == "column_in_dataframe" else column
    if check.startswith(("dtype", "coerce_dtype")):
        is_text = "str" in check
        return f"{subject} is not text" if is_text else f"{subject} is of another type: {check}"
    return f"{subject} {_MESSAGES.get(check, check)}"


def describe_faults(faults: Faults, name: str, *, otherwise: str = "") -> DataError:
    """Returns an error that names the invalid rows of the table `name` and their faults.

    Args:
        faults: At least one.
        name: Of the table.
        otherwise: A further way out, besides changing the rows.
    """
    lines = [
        text + (f": rows {numbers(sorted(rows))}" if rows else "")
        for text, rows in list(faults.items())[:_NUM_NAMED_CHECKS]
    ]
    count = f"{len(faults)} checks" if len(faults) > 1 else "a check"
    more = f", of which the first {len(lines)} are" if len(faults) > len(lines) else ""
    return DataError(
        f"the {name} data set fails {count}{more}:\n    " + "\n    ".join(lines),
        fix=f"mend or remove these rows (counted from 0){otherwise}",
    )


def numbers(rows: Sequence[int]) -> str:
    """Formats row numbers: the first ones, and how many more there are."""
    named = ", ".join(str(row) for row in rows[:_NUM_NAMED_ROWS])
    hidden = len(rows) - _NUM_NAMED_ROWS
    return f"{named} and {hidden} more" if hidden > 0 else named


def _same_lengths(frame: pd.DataFrame, one: str, other: str) -> "pd.Series[bool]":
    fits = [
        _is_list(a) and _is_list(b) and len(a) == len(b)
        for a, b in zip(frame[one], frame[other], strict=True)
    ]
    return pd.Series(fits, index=frame.index, dtype=bool)
