"""Checks of single columns: text, JSON, lists."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pandas as pd
from pandera.typing import Series


def is_json_object(text: Any) -> bool:
    """Whether a value is the text of a JSON object."""
    if isinstance(text, str) and text == "{}":
        return True
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False


def has_text(column: "Series[str]") -> "pd.Series[bool]":
    # Values that are not text pass: the check of the column's type reports them.
    """Whether each value of a column has text in it."""
    return check_each(column, lambda value: not isinstance(value, str) or bool(value.strip()))


def check_each(column: Any, holds: Callable[[Any], bool]) -> "pd.Series[bool]":
    """Applies a check value by value, for columns of lists, which have no pandas type."""
    values = column.tolist()  # one by one, a column of strings makes each value anew
    return pd.Series([bool(holds(value)) for value in values], index=column.index, dtype=bool)


def is_text_or_null(value: Any) -> bool:
    """Whether a value is text, None or NaN."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return isinstance(value, str) or value is None or is_nan


def is_list(value: Any) -> bool:
    """Whether a value is a collection, and neither text nor a mapping."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def is_finite_list(value: Any) -> bool:
    """Whether a value is a list of finite numbers."""
    return is_list(value) and all(math.isfinite(item) for item in value)


def is_token_list(value: Any) -> bool:
    """Whether a value is a list of at least one token id."""
    return is_list(value) and len(value) > 0 and all(item >= 0 for item in value)


def same_lengths(frame: pd.DataFrame, one: str, other: str) -> "pd.Series[bool]":
    """Whether the lists of two columns are of one length in each row."""
    fits = [
        is_list(a) and is_list(b) and len(a) == len(b)
        for a, b in zip(frame[one], frame[other], strict=True)
    ]
    return pd.Series(fits, index=frame.index, dtype=bool)
