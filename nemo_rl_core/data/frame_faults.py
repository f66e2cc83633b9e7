"""Faults of a frame under its pandera schema, reported together with their rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from pandera.errors import SchemaErrors

from nemo_rl_core.config.row_policy import MAX_DROPPED
from nemo_rl_core.data.frames import Faults, Schema
from nemo_rl_core.errors import DataError

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
