"""Compute time of each rank, excluding waits, to find the ranks that the others wait for.

All ranks end a step together, so its wall time on every rank is that of the slowest. This measures
times without waits instead: CPU time of the process on CPUs, and on GPUs the duration of a fixed
matrix product at the beginning of a step.
"""

import logging
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl_core.distributed.process_group import local_device, rank

if TYPE_CHECKING:
    from nemo_rl_core.distributed.worker_group import RayWorkerGroup

_LOG = logging.getLogger(__name__)

NUM_STEPS = 10
"""Number of steps that are averaged: a single slow step does not make a straggler."""
RATIO = 1.5
"""A rank is a straggler if its compute time reaches this multiple of the median of all ranks."""
_PROBE_SIZE, _PROBE_PRODUCTS = 2048, 8

_steps: list[tuple[float, float]] = []
"""Wall and compute seconds of this process's steps since the last `pop_step_times`."""
_probe_input: Any = None


@dataclass(frozen=True)
class RankTimes:
    """Mean times of one rank over some steps.

    Attributes:
        wall_seconds: Wall time per step, including waiting.
        own_seconds: Compute time per step (see the module).
    """

    rank: int
    host: str
    num_steps: int
    wall_seconds: float
    own_seconds: float


@contextmanager
def step_time() -> Iterator[None]:
    """Records the times of a forward and backward pass that ends with results on the host."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    wall, cpu, events = time.perf_counter(), time.process_time(), _started_probe()
    yield
    own_seconds = time.process_time() - cpu
    if events is not None:
        own_seconds = events[0].elapsed_time(events[1]) / 1000
    _steps.append((time.perf_counter() - wall, own_seconds))


def _started_probe() -> tuple[Any, Any] | None:
    """Returns CUDA events around a fixed product, without waiting; None on a CPU."""
    import torch

    global _probe_input  # noqa: PLW0603  (one per process)
    device = local_device()
    if device.type != "cuda":
        return None
    if _probe_input is None:
        size = (_PROBE_SIZE, _PROBE_SIZE)
        _probe_input = torch.full(size, 1 / _PROBE_SIZE, dtype=torch.bfloat16, device=device)
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    product = _probe_input
    for _ in range(_PROBE_PRODUCTS):
        product = product @ _probe_input
    end.record()
    return start, end


def pop_step_times(_: Any = None) -> RankTimes | None:
    """Returns the means of this process's steps since the last call; None if there were none."""
    steps, _steps[:] = list(_steps), []
    if not steps:
        return None
    walls, owns = zip(*steps, strict=True)
    host = socket.gethostname()
    return RankTimes(rank(), host, len(steps), statistics.fmean(walls), statistics.fmean(owns))


def stragglers(times: Sequence[RankTimes]) -> list[str]:
    """Describes the ranks that the others wait for, the slowest first.

    Example:
        >>> ranks = [RankTimes(rank, f"node{rank}", 10, 3.0, 1.0 + rank) for rank in range(3)]
        >>> stragglers([*ranks[:2], RankTimes(2, "node2", 10, 3.0, 5.0)])
        ['rank 2 on node2 computes 2.50 times as long as the median rank, 5.00 s per step']
    """
    # With two ranks, the lower median is the faster one; a mean would hide the slower one.
    median = statistics.median_low([each.own_seconds for each in times]) if times else 0.0
    slow = [each for each in times if median and each.own_seconds > RATIO * median]
    return [
        f"rank {each.rank} on {each.host} computes {each.own_seconds / median:.2f} times as long "
        f"as the median rank, {each.own_seconds:.2f} s per step"
        for each in sorted(slow, key=lambda each: -each.own_seconds)
    ]


class RankTimesLog:
    """Logs every few steps how long the ranks compute."""

    def __init__(self, workers: "RayWorkerGroup") -> None:
        self._workers, self._num_steps = workers, 0

    def step_ended(self) -> None:
        """Counts a step."""
        self._num_steps += 1
        if self._workers.world_size == 1 or self._num_steps % NUM_STEPS:
            return
        answers = self._workers.run_all_workers_single_data("__ray_call__", pop_step_times)
        times = [each for each in answers if each is not None]
        _LOG.info(
            "seconds of a step by rank, with waiting and without: %s",
            ", ".join(f"{t.rank} {t.wall_seconds:.3f} {t.own_seconds:.3f}" for t in times),
        )
        for sentence in stragglers(times):
            _LOG.warning("%s, over the last %d steps", sentence, NUM_STEPS)
