"""Where the seconds and the memory of a step went."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Timer:
    """Sums the wall seconds of named phases.

    Example:
        >>> timer = Timer()
        >>> with timer.phase("rollout"):
        ...     pass
        >>> list(timer.take())
        ['rollout_seconds']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to the phase, also when it ends with an error.

        A phase inside another counts in both.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    def take(self) -> dict[str, float]:
        """Hands over `{"<phase>_seconds": seconds}` in order of first use, and starts anew."""
        taken = {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken


def peak_memory_gib(pids: Iterable[int] = ()) -> float:
    """The peak resident memory of processes, in GiB, summed; without pids, of this one.

    From `VmHWM` in `/proc`, since `ru_maxrss` counts what a process was before its exec. Memory
    that processes share counts in each, so that the sum is an upper bound. Ended ones count 0.
    """
    kib = (_peak_kib(pid) for pid in (tuple(pids) or (os.getpid(),)))
    return sum(kib) / 2**20


def _peak_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0
