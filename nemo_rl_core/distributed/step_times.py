"""How long each rank computes by itself in a step, to find the one that the others wait for.

Ranks of a gang end a step together, so that the wall time of a step is that of the slowest one on
all of them. Measured is what does not wait: on CPUs the seconds of the process's processors, on
GPUs the seconds of a fixed matrix product on the device at the beginning of a step.
"""

import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.distributed.process_group import local_device, rank, world_size

RATIO = 1.5
"""Of a rank's own seconds to the median of all, from which on it is a straggler."""
_PROBE_SIZE, _PROBE_PRODUCTS = 2048, 8

_steps: list[tuple[float, float]] = []
"""Wall seconds and own seconds of the steps of this process that nobody has taken yet."""
_probe_input: Any = None


@dataclass(frozen=True)
class RankTimes:
    """Means over some steps of one rank.

    Attributes:
        rank: Of the group.
        host: Its machine.
        num_steps: How many.
        wall_seconds: Of a step, waiting included.
        own_seconds: As the module describes.
    """

    rank: int
    host: str
    num_steps: int
    wall_seconds: float
    own_seconds: float


@contextmanager
def step_time() -> Iterator[None]:
    """Records the times of a forward and backward pass that ends with results on the host."""
    if world_size() == 1:
        yield
        return
    wall, cpu, events = time.perf_counter(), time.process_time(), _started_probe()
    yield
    own = time.process_time() - cpu
    if events is not None:
        own = events[0].elapsed_time(events[1]) / 1000
    _steps.append((time.perf_counter() - wall, own))


def _started_probe() -> tuple[Any, Any] | None:
    """CUDA events around a fixed product; None on a CPU. Waits for nothing."""
    import torch

    global _probe_input  # noqa: PLW0603  (one a process)
    device = local_device()
    if device.type != "cuda":
        return None
    if _probe_input is None:
        size = (_PROBE_SIZE, _PROBE_SIZE)
        _probe_input = torch.full(size, 1 / _PROBE_SIZE, dtype=torch.bfloat16, device=device)
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    found = _probe_input
    for _ in range(_PROBE_PRODUCTS):
        found = found @ _probe_input
    end.record()
    return start, end


def taken_times(_: Any = None) -> RankTimes | None:
    """The means of this process's steps since the last call; None if there were none."""
    found, _steps[:] = list(_steps), []
    if not found:
        return None
    walls, owns = zip(*found, strict=True)
    host = socket.gethostname()
    return RankTimes(rank(), host, len(found), statistics.fmean(walls), statistics.fmean(owns))


def stragglers(times: Sequence[RankTimes]) -> list[str]:
    """What to tell of the ranks that the others wait for, the slowest first.

    Args:
        times: Of all ranks.

    Example:
        >>> ranks = [RankTimes(rank, f"node{rank}", 10, 3.0, 1.0 + rank) for rank in range(3)]
        >>> stragglers([*ranks[:2], RankTimes(2, "node2", 10, 3.0, 5.0)])
        ['rank 2 on node2 computes 2.50 times as long as the median rank, 5.00 s of a step']
    """
    # Of two ranks the faster one, since a mean of both would hide the other.
    usual = statistics.median_low([each.own_seconds for each in times]) if times else 0.0
    slow = [each for each in times if usual and each.own_seconds > RATIO * usual]
    return [
        f"rank {each.rank} on {each.host} computes {each.own_seconds / usual:.2f} times as long as "
        f"the median rank, {each.own_seconds:.2f} s of a step"
        for each in sorted(slow, key=lambda each: -each.own_seconds)
    ]
