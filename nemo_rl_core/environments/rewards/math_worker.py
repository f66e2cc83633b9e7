"""Child process of `math.MathScorer`: one JSON request per line in, one JSON reply per line out.

Each request is answered by a forked process: the kernel can kill it even in C code, and every
comparison starts from the same state of sympy's caches, so that its cost does not depend on earlier
comparisons. Limits on the work of a comparison do not depend on the speed of the machine: sympy
evaluates the expressions that it reads, and `9^{9^9}` has 370 million digits. Operations that
create such numbers raise, and Python calls are counted; long work in few calls is left to the
limit on CPU time.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from nemo_rl_core.environments.rewards.math_answers import (
    compare_small_numbers_relatively,
    equal,
    equals_itself,
    have_equal_answers,
)

_MAX_MEMORY_GIB = 4
_MOST_BITS = 2**17
"""Maximum size of a power; 39,000 decimal digits."""
_MOST_FACTORS = 10_000
"""Maximum number of factors of a factorial or a binomial coefficient."""
_MOST_NESTED = 100
"""Maximum depth of nested brackets in an expression."""
_SAMPLES = (
    (r"x^{2}+1", r"$2x-1$"),
    (r"\frac{1+\sqrt{5}}{2}", r"$(1, 2)$"),
    (r"\sin(x)", r"$\{1, 2\}$"),
    (r"[0, 1)", r"$\begin{pmatrix}1&2\\3&4\end{pmatrix}$"),
    ("46", "46"),
)
"""Sample answers that warm up the parser's caches."""


class TooLargeError(BaseException):
    """An expression is nested too deeply, or a number is too large.

    It is not an Exception: math-verify would catch it and try other comparisons, which are as slow.
    """


def reply(request: dict[str, Any]) -> dict[str, Any]:
    """Returns `{"score": ...}`, `{"limit": which}` or `{"error": ...}`.

    A request has `answers` to check, two `completions` to compare with each other, or an `answer`
    and a `completion`; and `max_calls` and `cpu_seconds`.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(request, sending)
    os.close(sending)
    with os.fdopen(receiving, "rb") as file:
        output = file.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        answered: dict[str, Any] = json.loads(output)
        return answered
    if code == -signal.SIGXCPU:
        return {"limit": f"{request['cpu_seconds']} s of CPU time"}
    return {"error": f"the comparison ended with exit code {code}"}


def _answer(request: dict[str, Any], sending: int) -> None:
    def end(**answer: Any) -> None:
        os.write(sending, json.dumps(answer).encode())
        os._exit(0)

    try:
        # The CPU limit ends a process in C code; `reply` reports that as a limit.
        seconds, most = request["cpu_seconds"], request["max_calls"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        _count_calls(most, lambda: end(limit=f"{most} Python calls"))
        if "answers" in request:
            end(score=float(all(map(equals_itself, request["answers"]))))
        if "completions" in request:
            end(score=float(have_equal_answers(*request["completions"])))
        end(score=float(equal(request["answer"], request["completion"])))
    except (TooLargeError, MemoryError, RecursionError) as error:
        end(limit=f"{type(error).__name__}: {str(error)[:200]}")
    # Broad on purpose: sympy may raise anything; the parent turns it into a RewardError.
    except Exception as error:  # noqa: BLE001 (sent to the parent)
        end(error=f"{type(error).__name__}: {str(error)[:200]}")
    finally:
        os._exit(1)


def main() -> None:
    """Answers requests until stdin closes."""
    import logging
    import random

    limit = _MAX_MEMORY_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.WARNING)
    # Replies are written to a copy of stdout, so that text printed by sympy cannot mix with them.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        from sympy.core.random import seed

        _refuse_large_numbers()
        compare_small_numbers_relatively()
        # sympy compares some expressions at random numbers: the same ones each time.
        seed(0)
        random.seed(0)
        # So that the forked processes inherit loaded modules and warm caches.
        for answer, completion in _SAMPLES:
            equal(answer, completion)
        # The first line: this process is ready for requests.
        answers.write("{}\n")
        answers.flush()
        for line in sys.stdin:
            answers.write(json.dumps(reply(json.loads(line))) + "\n")
            answers.flush()


def _refuse_large_numbers() -> None:
    from math_verify import parser
    from sympy import Integer, Rational, binomial, factorial

    for kind in (Rational, Integer):
        kind._eval_power = _bounded_power(kind._eval_power)
    factorial.eval = classmethod(_bounded_factors(factorial.eval.__func__, _factors_of_factorial))
    binomial.eval = classmethod(_bounded_factors(binomial.eval.__func__, _factors_of_binomial))
    for name in ("parse_latex_cached", "parse_expr_cached"):
        setattr(parser, name, _bounded_nesting(getattr(parser, name)))


def _count_calls(max_calls: int, stop: Callable[[], None]) -> None:
    num_calls_left = max_calls

    def traced(_frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal num_calls_left
        num_calls_left -= 1
        if num_calls_left < 0:
            stop()

    sys.settrace(traced)


def _bounded_power(power: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def bounded(self: Any, exponent: Any) -> Any:
        if exponent.is_Rational and exponent.is_finite:
            largest = max(abs(self.p), self.q)
            if largest > 1 and largest.bit_length() * abs(exponent.p) > _MOST_BITS * exponent.q:
                raise TooLargeError(f"a power of more than {_MOST_BITS} bits")
        return power(self, exponent)

    return bounded


def _bounded_factors(
    evaluate: Callable[..., Any], factors: Callable[..., Any]
) -> Callable[..., Any]:
    def bounded(cls: type, *arguments: Any) -> Any:
        if all(each.is_Integer for each in arguments) and factors(*arguments) > _MOST_FACTORS:
            raise TooLargeError(f"a product of more than {_MOST_FACTORS} factors")
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
            if depth > _MOST_NESTED:
                raise TooLargeError(f"more than {_MOST_NESTED} nested brackets")
        return parse(expression)

    return bounded


if __name__ == "__main__":
    main()
