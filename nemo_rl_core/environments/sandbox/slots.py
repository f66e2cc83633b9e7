"""Admission of programs: few may compute at once, many may wait."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Condition

import psutil

from nemo_rl_core.distributed.resources import total_memory_gib

_LOOK_SECONDS = 0.2
"""Interval over which the CPU time of a program is measured."""
_BUSY_SHARE = 0.1
"""Share of a core above which a program counts as computing."""
_MAX_PROGRAMS = 256
"""Maximum number of programs that run at once, computing or waiting."""


class Slot:
    """Processes of one admitted run."""

    def __init__(self) -> None:
        self._launchers: list[int] = []
        self._looked_at, self._seconds, self._has_begun = time.monotonic(), 0.0, False
        self._computes = True

    def watch(self, launcher: int) -> None:
        """Adds the process id of a launcher, whose descendants are a program."""
        self._launchers.append(launcher)

    def computes(self) -> bool:
        """Whether the program has used a core, or waited for one, since the last check.

        A sandbox that is being built or removed waits for the kernel, and counts as computing.
        """
        elapsed = time.monotonic() - self._looked_at
        if elapsed >= _LOOK_SECONDS:
            seconds, num_processes = _runnable_seconds(self._launchers)
            has_begun = num_processes >= 3 * len(self._launchers) > 0
            # The time is smaller than before if a process has ended in the meantime.
            is_busy = not 0 <= seconds - self._seconds < _BUSY_SHARE * elapsed
            self._computes = is_busy or not (has_begun and self._has_begun)
            self._looked_at, self._seconds = time.monotonic(), seconds
            self._has_begun = has_begun
        return self._computes


class Slots:
    """Limits the number of programs that compute, and the total number of programs.

    A sleeping program uses no core, so that it does not keep other programs waiting;
    `num_parallel` may be exceeded when it wakes up. All programs together, at `memory_mib` for each
    slot, are limited to half of the memory that is free now (`most`).
    """

    def __init__(self, num_parallel: int, memory_mib: int) -> None:
        free = min(psutil.virtual_memory().available / 2**20, total_memory_gib() * 2**10)
        self.most = max(num_parallel, min(_MAX_PROGRAMS, int(free / 2 / memory_mib)))
        self._num_parallel = num_parallel
        self._slots: list[Slot] = []
        self._changed = Condition()

    @contextlib.contextmanager
    def taken(self) -> Iterator[Slot]:
        """Waits for a free slot; leaving the context frees it again."""
        slot = Slot()
        with self._changed:
            while not self._have_room():
                self._changed.wait(_LOOK_SECONDS)
            self._slots.append(slot)
        try:
            yield slot
        finally:
            with self._changed:
                self._slots.remove(slot)
                self._changed.notify()

    def _have_room(self) -> bool:
        if len(self._slots) >= self.most:
            return False
        return sum(slot.computes() for slot in self._slots) < self._num_parallel


def _runnable_seconds(launchers: list[int]) -> tuple[float, int]:
    """Returns the time that process trees have run or waited for a core, and their size.

    Waiting for a core counts, so that a program on a busy machine does not seem to sleep. On a
    kernel without these statistics every program counts as computing.
    """
    nanoseconds, num_processes, pids = 0, 0, [str(pid) for pid in launchers]
    while pids:
        # A process may end at any time.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path("/proc", pids.pop(), "task").iterdir():
                running, waiting, _ = (task / "schedstat").read_text().split()
                nanoseconds += int(running) + int(waiting)
                pids += (task / "children").read_text().split()
            num_processes += 1
    return nanoseconds / 1e9, num_processes
