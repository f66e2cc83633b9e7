"""CPU time of actors, read inside them: they may be on other machines."""

import os
from collections.abc import Sequence
from typing import Any

_SECONDS = 2.0
"""How long an actor may take to answer; one that computes or hangs counts as it did before."""


def read_cpu_seconds(actors: Sequence[Any]) -> dict[str, float]:
    """User and system time of each actor's process and its children, since they began.

    Returns:
        By the actor's id; those that do not answer, or have died, are left out.
    """
    import ray

    if not actors or not ray.is_initialized():
        return {}
    asked = {actor.__ray_call__.remote(_of_this_process): actor for actor in actors}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_SECONDS)
    found = {}
    for reference in done:
        try:
            found[asked[reference]._actor_id.hex()] = float(ray.get(reference))
        except ray.exceptions.RayError:
            continue  # it has died; what it used is what was read last
    return found


def _of_this_process(_: Any) -> float:
    import psutil

    own = os.times()
    running = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(own[:4]) + sum(times.user + times.system for times in running)
