"""Logging to several trackers without stopping or slowing training."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Length of a tracker's queue of steps; further steps are dropped for this tracker and counted."""


Outcome = Literal["succeeded", "failed", "stopped"]
"""Outcome of a run or stage; "stopped" means interrupted."""

Part = Literal["run", "stage"]
"""The part that a tracker records: a full run, or one stage of several."""


class Tracker(Protocol):
    """A destination of metrics: a file or a service. Used by one thread only."""

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step; may block, and may raise any error of its library."""
        ...

    def close(self, outcome: Outcome) -> None:
        """Flushes and closes the tracker."""
        ...


OpenTracker = Callable[[], Tracker]
"""Connects to a tracker; may block and raise like the tracker itself."""


class LoggerFacade:
    """Logs every step to every tracker, each on its own thread. A context manager.

    If a tracker raises, the error is logged once and the step is lost; the next step is tried
    again. A tracker that blocks (a server that never answers) delays nothing: its steps wait in a
    bounded queue. The complete record of training is `MetricsFile`.

    Args:
        trackers: Functions that open trackers, by name; called on the tracker's thread at the first
            step.
        close_seconds: Time that `close` waits for trackers with queued steps.

    Example:
        >>> with LoggerFacade({"jsonl": lambda: JsonLines(path)}) as log:      # doctest: +SKIP
        ...     log.log_metrics("train_sft", 3, {"loss": 0.7})
    """

    def __init__(self, trackers: Mapping[str, OpenTracker], *, close_seconds: float = 10.0) -> None:
        self._queues = [
            _TrackerQueue(name, open_tracker) for name, open_tracker in trackers.items()
        ]
        self._close_seconds = close_seconds

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Queues the metrics of a step for every tracker and returns immediately."""
        for each in self._queues:
            each.put(_Step(stage, step, dict(metrics)))

    def close(self, outcome: Outcome = "succeeded") -> None:
        """Waits up to `close_seconds` for queued steps; logs the number of lost ones."""
        for each in self._queues:
            each.end(outcome)
        for each in self._queues:
            each.join(self._close_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        failure: Outcome = "failed" if isinstance(error, Exception) else "stopped"
        self.close("succeeded" if error is None else failure)


@dataclass(frozen=True, slots=True)
class _Step:
    stage: str
    step: int
    metrics: dict[str, float]


class _TrackerQueue:
    def __init__(self, name: str, open_tracker: OpenTracker) -> None:
        self._name, self._open = name, open_tracker
        self._waiting: queue.Queue[_Step | None] = queue.Queue(MAX_WAITING + 1)
        self._tracker: Tracker | None = None
        self._outcome: Outcome = "succeeded"
        self._num_lost = 0
        self._is_failing = False
        self._thread: threading.Thread | None = None

    def put(self, step: _Step) -> None:
        if self._thread is None:
            # A daemon thread, so that a server that never answers cannot keep the program alive.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        if self._waiting.qsize() >= MAX_WAITING:
            self._lose(step, "its queue is full")
        else:
            self._waiting.put_nowait(step)

    def end(self, outcome: Outcome) -> None:
        self._outcome = outcome
        if self._thread is not None:
            self._waiting.put_nowait(None)

    def join(self, seconds: float) -> None:
        if self._thread is None:
            return
        self._thread.join(seconds)
        num_lost = self._num_lost + max(0, self._waiting.qsize() - 1)
        if self._thread.is_alive():
            logger.warning(
                "%s did not finish within %g s of the end: %d steps or more are lost",
                self._name,
                seconds,
                num_lost + 1,
            )
        elif num_lost:
            logger.warning("%s has lost %d steps of this run", self._name, num_lost)

    def _run(self) -> None:
        for step in iter(self._waiting.get, None):
            try:
                if self._tracker is None:
                    self._tracker = self._open()
                self._tracker.log_metrics(step.stage, step.step, step.metrics)
            except Exception as error:  # noqa: BLE001  (any error of its library)
                self._lose(step, f"{type(error).__name__}: {error}")
            else:
                self._is_failing = False
        try:
            if self._tracker is not None:
                self._tracker.close(self._outcome)
        except Exception as error:  # noqa: BLE001  (any error of its library)
            logger.warning("%s could not be closed: %s", self._name, error)

    def _lose(self, step: _Step, reason: str) -> None:
        self._num_lost += 1
        if not self._is_failing:
            self._is_failing = True
            logger.warning(
                "%s accepts no metrics since step %d of %s; training continues: %s",
                self._name,
                step.step,
                step.stage,
                reason,
            )


def with_unique_names(named: Sequence[tuple[str, OpenTracker]]) -> dict[str, OpenTracker]:
    """Makes names unique: further trackers of one kind get a number."""
    unique: dict[str, OpenTracker] = {}
    for name, opener in named:
        num_before = sum(other.partition(" ")[0] == name for other in unique)
        unique[f"{name} {num_before + 1}" if num_before else name] = opener
    return unique
