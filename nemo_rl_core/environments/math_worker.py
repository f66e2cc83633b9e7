"""The child process of `math.MathScorer`: one JSON request a line in, one JSON reply a line out.

A process of its own, because math-verify needs SIGALRM (hence a main thread), and because nothing
else can stop an exponentiation inside the interpreter's C code.
"""

import json
import os
import resource
import signal
import sys
from typing import Any

_MAX_MEMORY_GIB = 4
_GRACE_SECONDS = 2.0


class DeadlinePassedError(BaseException):
    """Not an Exception, so that no `except Exception` of sympy's swallows it."""


def equal(answer: str, completion: str) -> bool:
    """Whether the completion's final answer equals the reference.

    Raises:
        ValueError: When the reference itself is no mathematics.
    """
    from math_verify import parse, verify

    # A bare answer is read as LaTeX: between dollars "x^2+1" and "(1, 2)" mean what they say.
    marked = "$" in answer or "\\boxed" in answer
    reference = parse(answer if marked else f"${answer}$", parsing_timeout=None)
    # What could not be turned into an expression is kept as text.
    if all(isinstance(each, str) for each in reference):
        raise ValueError(
            f"math-verify finds no mathematics in the reference answer {answer[:80]!r}"
        )
    # A completion in which nothing can be read is wrong; only the reference must be readable.
    found = parse(completion, parsing_timeout=None)
    return bool(found) and bool(verify(reference, found, timeout_seconds=None, raise_on_error=True))


def reply(request: dict[str, Any]) -> dict[str, Any]:
    """`{"score": ...}`, `{"timeout": true}` or `{"error": ...}`."""
    seconds = float(request["timeout_seconds"])
    # The first alarm reaches Python code. The second kills the process, if C code lets the first
    # one wait: the parent would, but it may be gone.
    signal.setitimer(signal.ITIMER_PROF, seconds + _GRACE_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return {"score": float(equal(request["answer"], request["completion"]))}
    except DeadlinePassedError:
        return {"timeout": True}
    # Named fault boundary: sympy raises anything at all; the parent turns it into a RewardError.
    except Exception as error:  # noqa: BLE001 (sent to the parent)
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _deadline_passed(_signal: int, _frame: object) -> None:
    raise DeadlinePassedError


def main() -> None:
    """Serves until stdin closes."""
    import logging

    limit = _MAX_MEMORY_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, _deadline_passed)
    logging.disable(logging.WARNING)
    # Replies go out on a copy of stdout: what sympy might print must not come between them.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        import math_verify  # noqa: F401 (so that the first request does not pay for it)

        answers.write("{}\n")
        answers.flush()
        for line in sys.stdin:
            answers.write(json.dumps(reply(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
