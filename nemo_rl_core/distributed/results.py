"""Answers of several ranks, or the one failure that the others follow from."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.errors import NemoRLError, TransferError, WorkerError, WorkerLostError

_SECONDS_FOR_THE_CAUSE = 10.0
_NUM_FRAMES = 4
_WORDS_OF_COLLECTIVES = ("gloo", "nccl", "process group", "connection closed by peer", "timed out")


def wait_for_all(
    pending: Sequence[Any],
    *,
    workers: Mapping[Any, str],
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Waits until all references have values, or one of them has failed.

    A rank that fails takes others with it: their collectives break, or hang. So the first failure
    ends the wait, and one that looks like a broken collective gives the rank that broke it some
    seconds to be heard.

    Args:
        pending: References to the answers of actors' methods.
        workers: What messages call each actor, by its id: worker 0 of 'training'.
        timeout_seconds: How long to wait at most; None waits for ever.

    Returns:
        The values, in the order of `pending`.

    Raises:
        WorkerError: If a worker raised.
        WorkerLostError: If a worker died, or did not answer in time.
        NemoRLError: As a worker raised it.
    """
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    values: dict[Any, Any] = {}
    waiting, follower = list(pending), None
    deadline = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
    while waiting and time.monotonic() < deadline:
        left = max(0.0, deadline - time.monotonic())
        ready, waiting = ray.wait(waiting, timeout=None if left == float("inf") else left)
        if waiting:  # the others that are ready by now, in one look: there may be thousands
            others, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            ready += others
        for reference in ready:
            try:
                values[reference] = ray.get(reference)
            except (RayTaskError, RayActorError) as error:
                found = _described(error, worker=_worker_of(reference, workers))
                if not _is_of_a_collective(error):
                    raise found from error
                if follower is None:
                    follower, deadline = found, time.monotonic() + _SECONDS_FOR_THE_CAUSE
    if follower is not None:
        raise follower
    if waiting:
        raise WorkerLostError(
            f"{_worker_of(waiting[0], workers)} did not answer in time",
            expected=f"an answer within {timeout_seconds} s",
            got=f"{len(waiting)} of {len(pending)} workers still at it",
            fix="raise the deadline if the work takes as long",
        )
    return [values[reference] for reference in pending]


def _worker_of(reference: Any, workers: Mapping[Any, str]) -> str:
    return workers.get(reference.task_id().actor_id(), "a worker")


def _is_of_a_collective(error: Exception) -> bool:
    cause = getattr(error, "cause", None)
    if isinstance(cause, TransferError):
        return True
    said = str(cause).lower()
    return isinstance(cause, RuntimeError) and any(word in said for word in _WORDS_OF_COLLECTIVES)


def _described(error: Any, *, worker: str) -> NemoRLError:
    from ray.exceptions import RayTaskError

    if not isinstance(error, RayTaskError):
        return WorkerLostError(
            f"{worker} died",
            got=str(error).splitlines()[0],
            fix="often memory: lower max_tokens_per_microbatch or generation.kv_cache_gib; "
            "then run the same command again, it resumes from the last save",
        )
    cause, trace = error.cause, str(error)
    # Ray hands out an exception of the cause's type, in which only the text still says where.
    found = re.search(r"pid=(\d+), ip=([^,)\s]+)", trace)
    where = f"host {found[2]}, process {found[1]}" if found else "an unknown host"
    if isinstance(cause, NemoRLError):
        raised = type(cause)(*cause.args)
        raised.add_note(f"raised by {worker} on {where}")
        return raised
    frames = [line.strip() for line in trace.splitlines() if line.lstrip().startswith("File ")]
    return WorkerError(
        f"{worker} raised {type(cause).__name__}: {cause}"[:500],
        got="\n    ".join([f"on {where}", *frames[-_NUM_FRAMES:]]),
        fix="the worker's whole trace is in the log",
    )
