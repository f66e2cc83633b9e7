"""The child process of `math.MathScorer`: one JSON request a line in, one JSON reply a line out.

Each request is answered by a process forked for it: the kernel can end that one, whatever C code it
is in, and every comparison starts from the same state of sympy's caches, so that what it costs does
not depend on those before it.
"""

import json
import os
import resource
import signal
import sys
from typing import Any

from nemo_rl_core.environments.rewards.math_answers import (
    compare_small_numbers_relatively,
    equal,
    equals_itself,
)
from nemo_rl_core.environments.rewards.math_limits import (
    TooLargeError,
    count_calls,
    refuse_large_numbers,
)

_MAX_MEMORY_GIB = 4
_SAMPLES = (
    (r"x^{2}+1", r"$2x-1$"),
    (r"\frac{1+\sqrt{5}}{2}", r"$(1, 2)$"),
    (r"\sin(x)", r"$\{1, 2\}$"),
    (r"[0, 1)", r"$\begin{pmatrix}1&2\\3&4\end{pmatrix}$"),
    ("46", "46"),
)
"""Forms of answers; the parser is quicker with those that it has seen."""


def reply(request: dict[str, Any]) -> dict[str, Any]:
    """`{"score": ...}`, `{"limit": which}` or `{"error": ...}`.

    Args:
        request: An answer; a completion, or none to check the answer; `max_calls`, `cpu_seconds`.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(request, sending)
    os.close(sending)
    with os.fdopen(receiving, "rb") as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        answered: dict[str, Any] = json.loads(said)
        return answered
    if code == -signal.SIGXCPU:
        return {"limit": f"{request['cpu_seconds']} s of CPU time"}
    return {"error": f"the comparison ended with exit code {code}"}


def _answer(request: dict[str, Any], sending: int) -> None:
    """Writes the reply and ends the process, which has just been forked."""

    def end(**said: Any) -> None:
        os.write(sending, json.dumps(said).encode())
        os._exit(0)

    try:
        # One that is in C code ends by the first, and counts for `reply` as having taken too long.
        seconds, most = request["cpu_seconds"], request["max_calls"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        count_calls(most, lambda: end(limit=f"{most} Python calls"))
        if request["completion"] is None:
            end(score=float(equals_itself(request["answer"])))
        end(score=float(equal(request["answer"], request["completion"])))
    except (TooLargeError, MemoryError, RecursionError) as error:
        end(limit=f"{type(error).__name__}: {str(error)[:200]}")
    # Named fault boundary: sympy raises anything at all; the parent turns it into a RewardError.
    except Exception as error:  # noqa: BLE001 (sent to the parent)
        end(error=f"{type(error).__name__}: {str(error)[:200]}")
    finally:
        os._exit(1)


def main() -> None:
    """Serves until stdin closes."""
    import logging
    import random

    limit = _MAX_MEMORY_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.WARNING)
    # Replies go out on a copy of stdout: what sympy might print must not come between them.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        from sympy.core.random import seed

        refuse_large_numbers()
        compare_small_numbers_relatively()
        # sympy compares some expressions at random numbers: the same ones each time.
        seed(0)
        random.seed(0)
        # So that not every comparison pays for what the first ones load and compute.
        for answer, completion in _SAMPLES:
            equal(answer, completion)
        answers.write("{}\n")
        answers.flush()
        for line in sys.stdin:
            answers.write(json.dumps(reply(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
