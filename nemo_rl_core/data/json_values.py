"""Conversion of row values to JSON types, without Arrow's null padding."""

import json
import math
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

_PLAIN = (str, int, float, bool, type(None))


def json_default(value: Any) -> Any:
    """Converts dates, UUIDs and decimals for `json.dumps(default=...)`.

    Raises:
        ValueError: For any other type, such as bytes.
    """
    if isinstance(value, date | datetime | time | UUID):
        return str(value)
    if isinstance(value, Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else float(value)
    raise ValueError(f"has a value of type {type(value).__name__}, which JSON cannot represent")


def parsed(value: Any, kind: type | tuple[type, ...]) -> Any:
    """Returns the value of a JSON text if it is of that type; other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        content = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return content if isinstance(content, kind) else value


def plain_row(row: Mapping[str, Any], *, is_padded: bool = False) -> dict[str, Any]:
    """Converts numpy, torch and pandas values of a row to JSON types.

    Args:
        row: Values by column. NaN becomes None, as in files that pandas writes.
        is_padded: Whether nulls in nested values may be Arrow's padding, which is removed. Values
            with pandas arrays always are.

    Example:
        >>> import numpy as np
        >>> plain_row({"n": np.int64(3), "is_hard": np.bool_(False), "x": float("nan")})
        {'n': 3, 'is_hard': False, 'x': None}
    """
    plain = {str(key): _plain(value, is_padded) for key, value in row.items()}
    is_nan = {key: isinstance(value, float) and math.isnan(value) for key, value in plain.items()}
    return {key: None if is_nan[key] else value for key, value in plain.items()}


def without_padding(value: Any) -> Any:
    """Returns a value without null entries of mappings, at any depth.

    Arrow pads all structs of a column to the same keys: `{"city": "Rome", "expression": None}`.
    """
    if isinstance(value, dict):
        return {key: without_padding(item) for key, item in value.items() if item is not None}
    return [without_padding(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any, is_padded: bool) -> Any:
    if type(value) in _PLAIN:
        return value
    if type(value).__name__ in ("NAType", "NaTType"):  # pandas
        return None
    if hasattr(value, "tolist"):  # numpy, torch and pandas
        is_time = getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m")
        listed = value.astype(str).tolist() if is_time else value.tolist()
        return listed if type(listed) is type(value) else _plain(listed, True)
    if isinstance(value, Mapping):
        is_padded = is_padded or any(getattr(item, "ndim", 0) for item in value.values())
        pairs = ((str(key), _plain(item, is_padded)) for key, item in value.items())
        return {key: item for key, item in pairs if not (is_padded and item is None)}
    return [_plain(item, is_padded) for item in value] if isinstance(value, list | tuple) else value
