"""Reports what a run is waiting for to the display; of nested waits, the innermost is shown."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nemo_rl_core.store.files import while_hashing
from nemo_rl_core.telemetry.events import Waiting, publish

_SECONDS_BETWEEN_EVENTS = 0.25
_SECONDS_BETWEEN_LOOKS = 0.5

_waits: "list[Wait]" = []
_lock = threading.Lock()


class Wait:
    """A wait in progress; the unit of its amount is "bytes" or a plural noun."""

    def __init__(self, text: str, total: float | None = None, unit: str = "") -> None:
        self._text, self._unit = text, unit
        self._done, self._total = 0.0, total
        self._published = 0.0

    def advance(self, amount: float = 1) -> None:
        """Adds to the done amount; may be called from any thread, and often."""
        with _lock:
            self._done += amount
        self._publish_sometimes()

    def reach(self, done: float) -> None:
        """Sets the done amount."""
        with _lock:
            self._done = done
        self._publish_sometimes()

    def event(self) -> Waiting:
        """Returns the current state of the wait."""
        return Waiting(self._text, self._done, self._total, self._unit)

    def _publish_sometimes(self) -> None:
        now = time.perf_counter()
        if now - self._published >= _SECONDS_BETWEEN_EVENTS and _waits and _waits[-1] is self:
            self._published = now
            publish(self.event())


@contextmanager
def waiting(text: str, *, total: float | None = None, unit: str = "") -> Iterator[Wait]:
    """Shows a wait with its duration while the body runs.

    Example:
        >>> with waiting("hashing the model", total=3, unit="files") as wait:
        ...     wait.advance()
    """
    wait = Wait(text, total, unit)
    with _lock:
        _waits.append(wait)
    publish(wait.event())
    try:
        yield wait
    finally:
        with _lock:
            _waits.remove(wait)
            outer = _waits[-1] if _waits else None
        publish(outer.event() if outer else Waiting(""))


@contextmanager
def waiting_for_files(text: str, *folders: Path) -> Iterator[None]:
    """Shows a wait with the number of bytes that are added to folders.

    For libraries that report no progress; their progress bars go to the run's log.
    """
    with waiting(text, unit="bytes") as wait:
        before, over = _num_bytes(folders), threading.Event()

        def look() -> None:
            while not over.wait(_SECONDS_BETWEEN_LOOKS):
                wait.reach(max(_num_bytes(folders) - before, 0))

        thread = threading.Thread(target=look, name="waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def waiting_for_hashes(text: str) -> Iterator[None]:
    """Shows a wait with the number of bytes that this thread hashes in the body."""
    with waiting(text, unit="bytes") as wait, while_hashing(wait.advance):
        yield


def _num_bytes(folders: Sequence[Path]) -> int:
    total = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):  # renamed or removed since it was listed
                    total += Path(parent, name).lstat().st_size
    return total
