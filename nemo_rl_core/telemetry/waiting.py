"""What a run waits for, for its display: Ray, an engine, a download.

Waits nest, and the innermost is shown. Outside of a run nobody subscribes, and nothing is shown.
"""

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
    """A wait that is going on.

    Args:
        text: What is waited for, such as "starting Ray".
        total: The amount when it is over; None where that is not known.
        unit: Of the amount: "bytes", or a noun in the plural.
    """

    def __init__(self, text: str, total: float | None = None, unit: str = "") -> None:
        self._text, self._unit = text, unit
        self._done, self._total = 0.0, total
        self._published = 0.0

    def advance(self, amount: float = 1) -> None:
        """Adds to what is done; may be called from any thread, and often."""
        with _lock:
            self._done += amount
        self._publish_sometimes()

    def reach(self, done: float, total: float | None = None) -> None:
        """Sets what is done, and the total where it is known only now."""
        with _lock:
            self._done, self._total = done, self._total if total is None else total
        self._publish_sometimes()

    def event(self) -> Waiting:
        """The wait as it is now."""
        return Waiting(self._text, self._done, self._total, self._unit)

    def _publish_sometimes(self) -> None:
        now = time.perf_counter()
        if now - self._published >= _SECONDS_BETWEEN_EVENTS and _waits and _waits[-1] is self:
            self._published = now
            publish(self.event())


@contextmanager
def waiting(text: str, *, total: float | None = None, unit: str = "") -> Iterator[Wait]:
    """Shows within it what the run waits for, and for how long.

    Args:
        text: What is waited for, such as "starting Ray".
        total: The amount when it is over, for a wait that calls `advance`.
        unit: Of the amount: "bytes", or a noun in the plural.

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
    """As `waiting`, and shows how many bytes come to lie in folders meanwhile.

    For libraries that download or write without a word: their progress bars go to the run's log.

    Args:
        text: What is waited for, such as "downloading org/model".
        folders: Where its files come to lie; they need not exist yet.
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
    """As `waiting`, and shows how many bytes this thread hashes within it."""
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
