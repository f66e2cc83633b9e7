"""CPU time and reads of user code of actors, asked of them: they may be on other machines."""

import os
from collections.abc import Sequence
from typing import Any

from nemo_rl_core.store import watching


def read_cpu_seconds(actors: Sequence[Any], timeout_seconds: float) -> dict[str, float]:
    """User and system time of each actor's process and its children, since they began.

    What user code in the actors has read is merged into the reads of this process.

    Args:
        actors: Handles of Ray actors.
        timeout_seconds: How long to wait for actors that compute or hang.

    Returns:
        By the actor's id; those that do not answer, or have died, are left out.
    """
    import ray

    if not actors or not ray.is_initialized():
        return {}
    asked = {actor.__ray_call__.remote(_of_this_process): actor for actor in actors}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_seconds)
    found = {}
    for reference in done:
        try:
            seconds, reads = ray.get(reference)
        except ray.exceptions.RayError:
            continue  # it has died; what it used is what was read last
        found[asked[reference]._actor_id.hex()] = float(seconds)
        watching.absorb(reads)
    return found


def _of_this_process(_: Any) -> tuple[float, watching.Report]:
    import psutil

    own = os.times()
    running = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    seconds = sum(own[:4]) + sum(times.user + times.system for times in running)
    return seconds, watching.report()
