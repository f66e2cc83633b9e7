"""Wall time of phases, and peak memory of processes."""

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
        """Adds the time of the body to the phase, also if it raises; nested phases count twice."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    def divide(self, phase: str, part: str, seconds: float) -> None:
        """Moves seconds from one phase to another.

        Example:
            >>> timer = Timer()
            >>> with timer.phase("train"):
            ...     pass
            >>> timer.divide("train", "logprobs", 0.0)
            >>> list(timer.take())
            ['train_seconds', 'logprobs_seconds']
        """
        for name, change in ((phase, -seconds), (part, seconds)):
            self._seconds[name] = self._seconds.get(name, 0.0) + change

    def take(self) -> dict[str, float]:
        """Returns `{"<phase>_seconds": seconds}` in order of first use, and resets the timer."""
        taken = {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken


def peak_memory_gib(pids: Iterable[int] = ()) -> float:
    """Sums the peak resident memory of processes, in GiB; without pids, of this process.

    Reads `VmHWM` in `/proc`, since `ru_maxrss` includes the process before its exec. Shared memory
    counts in each process, so the sum is an upper bound. Ended processes count 0.
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
