"""CPU time of Ray actors, and the files that their user code read."""

import os
from collections.abc import Sequence
from typing import Any

from nemo_rl_core.store import watching


def read_cpu_seconds(actors: Sequence[Any], timeout_seconds: float) -> dict[str, float]:
    """Returns user and system time of each actor's process and its children since their start.

    Also merges the reads of user code in the actors into the reads of this process.

    Returns:
        CPU seconds by actor id, without actors that have died or do not answer.
    """
    import ray

    if not actors or not ray.is_initialized():
        return {}
    pending = {actor.__ray_call__.remote(_measure): actor for actor in actors}
    done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=timeout_seconds)
    cpu_seconds = {}
    for reference in done:
        try:
            seconds, reads = ray.get(reference)
        except ray.exceptions.RayError:
            continue  # it has died; the last reading counts
        actor_id = pending[reference]._actor_id.hex()
        cpu_seconds[actor_id] = float(seconds)
        watching.absorb(reads, actor_id)
    return cpu_seconds


def _measure(_: Any) -> tuple[float, watching.Report]:
    import psutil

    running = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    seconds = sum(os.times()[:4]) + sum(times.user + times.system for times in running)
    return seconds, watching.report()
