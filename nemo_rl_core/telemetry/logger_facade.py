"""One place to log to for several trackers, none of which can stop or slow training."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Steps that wait for a slow tracker; what comes on top is lost to it, and counted."""


class Tracker(Protocol):
    """Somewhere that metrics go: a file, a service. It is used by one thread alone."""

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step; may block, and may raise whatever its library raises."""
        ...

    def close(self) -> None:
        """Sends what it still holds."""
        ...


OpenTracker = Callable[[], Tracker]
"""Connects to a tracker; may block and raise like the tracker itself."""


class LoggerFacade:
    """Tells every tracker of every step, each on a thread of its own. A context manager.

    A tracker that raises is named in the log once and has lost that step; the next one is tried
    again. One that blocks (a server that never answers) holds up nobody: its steps wait in a queue
    with an end. Training's own record is `MetricsFile`, which loses nothing.

    Args:
        trackers: By name, how to open each; opened on its own thread, at the first step.
        close_seconds: How long `close` waits for trackers that still have steps to send.

    Example:
        >>> with LoggerFacade({"jsonl": lambda: JsonLines(path)}) as log:      # doctest: +SKIP
        ...     log.log_metrics("train_sft", 3, {"loss": 0.7})
    """

    def __init__(self, trackers: Mapping[str, OpenTracker], *, close_seconds: float = 10.0) -> None:
        self._lines = [_Line(name, open_tracker) for name, open_tracker in trackers.items()]
        self._close_seconds = close_seconds

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Hands the metrics of a step to every tracker, and returns at once."""
        for line in self._lines:
            line.put(_Step(stage, step, dict(metrics)))

    def close(self) -> None:
        """Waits a while for what is under way; what is lost is counted in the log."""
        for line in self._lines:
            line.end()
        for line in self._lines:
            line.join(self._close_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Step:
    stage: str
    step: int
    metrics: dict[str, float]


class _Line:
    """A tracker, the steps that wait for it, and the thread that brings them."""

    def __init__(self, name: str, open_tracker: OpenTracker) -> None:
        self._name, self._open = name, open_tracker
        self._waiting: queue.Queue[_Step | None] = queue.Queue(MAX_WAITING + 1)
        self._tracker: Tracker | None = None
        self._num_lost = 0
        self._is_failing = False
        self._thread: threading.Thread | None = None

    def put(self, step: _Step) -> None:
        if self._thread is None:
            # A daemon, so that a server that never answers cannot keep the program from ending.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        if self._waiting.qsize() >= MAX_WAITING:
            self._lose(step, "its queue is full")
        else:
            self._waiting.put_nowait(step)

    def end(self) -> None:
        if self._thread is not None:
            self._waiting.put_nowait(None)

    def join(self, seconds: float) -> None:
        if self._thread is None:
            return
        self._thread.join(seconds)
        num_lost = self._num_lost + max(0, self._waiting.qsize() - 1)
        if self._thread.is_alive():
            logger.warning(
                "%s did not take all within %g s of the end: %d steps or more are not there",
                self._name,
                seconds,
                num_lost + 1,
            )
        elif num_lost:
            logger.warning("%s has not taken %d steps of this run", self._name, num_lost)

    def _run(self) -> None:
        for step in iter(self._waiting.get, None):
            try:
                if self._tracker is None:
                    self._tracker = self._open()
                self._tracker.log_metrics(step.stage, step.step, step.metrics)
            except Exception as error:  # noqa: BLE001  (whatever its library raises)
                self._lose(step, f"{type(error).__name__}: {error}")
            else:
                self._is_failing = False
        try:
            if self._tracker is not None:
                self._tracker.close()
        except Exception as error:  # noqa: BLE001  (whatever its library raises)
            logger.warning("%s could not be closed: %s", self._name, error)

    def _lose(self, step: _Step, why: str) -> None:
        self._num_lost += 1
        if not self._is_failing:
            self._is_failing = True
            logger.warning(
                "%s takes no metrics since step %d of %s; training goes on: %s",
                self._name,
                step.step,
                step.stage,
                why,
            )


def open_all(named: Sequence[tuple[str, OpenTracker]]) -> dict[str, OpenTracker]:
    """Names that differ: two trackers of a kind are told apart by a number."""
    found: dict[str, OpenTracker] = {}
    for name, opener in named:
        place = sum(known.partition(" ")[0] == name for known in found)
        found[f"{name} {place + 1}" if place else name] = opener
    return found
