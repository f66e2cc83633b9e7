"""Bounds on the work of one comparison that do not depend on how fast the machine is.

sympy computes the value of what it reads: `9^{9^9}` is a number of 370 million digits to it. The
operations that make such numbers refuse; Python calls are counted, since they are what its slow
algorithms consist of. What is left, long work in few calls, is for the limit on CPU time.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

MOST_BITS = 2**17
"""Of a number that is a power; 39,000 digits."""
MOST_FACTORS = 10_000
"""Of a factorial or a binomial coefficient."""
MOST_NESTED = 100
"""Brackets within brackets, in an expression."""


class TooLargeError(BaseException):
    """An expression is nested deeper, or a number larger, than is computed here.

    No Exception: math-verify would go on to other ways to compare, which are as slow.
    """


def refuse_large_numbers() -> None:
    """Replaces the operations of sympy and math-verify that one short expression keeps busy."""
    from math_verify import parser
    from sympy import Integer, Rational, binomial, factorial

    for kind in (Rational, Integer):
        kind._eval_power = _bounded_power(kind._eval_power)
    factorial.eval = classmethod(_bounded_factors(factorial.eval.__func__, _factors_of_factorial))
    binomial.eval = classmethod(_bounded_factors(binomial.eval.__func__, _factors_of_binomial))
    for name in ("parse_latex_cached", "parse_expr_cached"):
        setattr(parser, name, _bounded_nesting(getattr(parser, name)))


def count_calls(most: int, stop: Callable[[], None]) -> None:
    """Calls `stop` at the first Python call of this thread beyond the most."""
    left = most

    def traced(_frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            stop()

    sys.settrace(traced)


def _bounded_power(power: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def bounded(self: Any, exponent: Any) -> Any:
        if exponent.is_Rational and exponent.is_finite:
            largest = max(abs(self.p), self.q)
            if largest > 1 and largest.bit_length() * abs(exponent.p) > MOST_BITS * exponent.q:
                raise TooLargeError(f"a power of more than {MOST_BITS} bits")
        return power(self, exponent)

    return bounded


def _bounded_factors(
    evaluate: Callable[..., Any], factors: Callable[..., Any]
) -> Callable[..., Any]:
    def bounded(cls: type, *arguments: Any) -> Any:
        if all(each.is_Integer for each in arguments) and factors(*arguments) > MOST_FACTORS:
            raise TooLargeError(f"a product of more than {MOST_FACTORS} factors")
        return evaluate(cls, *arguments)

    return bounded


def _factors_of_factorial(n: Any) -> int:
    return int(n)


def _factors_of_binomial(n: Any, k: Any) -> int:
    return min(abs(int(k)), abs(int(n) - int(k)))


def _bounded_nesting(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def bounded(expression: str) -> Any:
        depth = 0
        for character in expression:
            depth += (character in "([{") - (character in ")]}")
            if depth > MOST_NESTED:
                raise TooLargeError(f"more than {MOST_NESTED} brackets within each other")
        return parse(expression)

    return bounded
