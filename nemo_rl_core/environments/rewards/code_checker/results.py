"""Comparison of a call's result with the row's."""

import math
from typing import Any

IS_RESULT, VALUES = "__is_result__", "__values__"
"""The names of `is_result` and `json.loads` in a test."""
_TOLERANCE, _ZERO = 1e-7, 1e-12


def is_result(result: Any, *expected: Any) -> bool:
    """Whether a result equals one of the expected values, which come from JSON.

    Tuples equal lists and numeric keys equal their text. Floats may differ by a relative 1e-7.

    Example:
        >>> is_result((1, {2: 0.1 + 0.2}), [1, {"2": 0.3}])
        True
        >>> is_result(1, 2, True), is_result(True, 1), is_result("1", 1)
        (False, False, False)
    """
    return any(_is_same(result, each) for each in expected)


def is_near(result: float, expected: float) -> bool:
    """Whether two floats are equal up to rounding.

    Example:
        >>> is_near(0.1 + 0.2 - 0.3, 0.0), is_near(0.0, 1e-13)
        (True, False)
    """
    is_zero = expected == 0 and abs(result) < _ZERO
    return result == expected or is_zero or math.isclose(result, expected, rel_tol=_TOLERANCE)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        named, expected = (
            {_as_text(key): value for key, value in each.items()} for each in (one, other)
        )
        return named.keys() == expected.keys() and all(
            _is_same(named[key], expected[key]) for key in named
        )
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float) and isinstance(other, float):
        return is_near(one, other)
    return bool(one == other)


def _as_text(key: Any) -> Any:
    is_plain = key is None or isinstance(key, str | int | float)
    return str(key) if is_plain else key
