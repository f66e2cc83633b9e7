"""What a run says: events for whoever shows them, and a log file for everything else.

Trainers and stages publish events without knowing whether anything shows them; a display
subscribes. Libraries log to the run's file. What C++ code and child processes write straight to the
terminal is caught by redirecting the descriptors, which must happen before Ray starts: a child
keeps the descriptors it was born with.
"""

import logging
import os
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self, TextIO

from nemo_rl_core.infra.files import storage_errors
from nemo_rl_core.infra.lineage import Cost
from nemo_rl_core.infra.store import Store
from nemo_rl_core.types import StepReport

logger = logging.getLogger(__name__)

LIBRARIES = ("ray", "vllm", "flytekit", "transformers", "datasets", "py.warnings")
OURS = "nemo_rl_core"


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A stage begins."""

    name: str


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage has ended: one line of the table at the end of a run.

    Attributes:
        name: The stage's, with the iteration where it has one.
        state: "cached" when its artifact was there already.
        seconds: Wall seconds it took in this run.
        tokens: How many it generated and trained on.
        peak_memory_gib: Of all its processes, summed.
        note: A short remark, such as an accuracy.
        cost: Of what it made in this run; nothing where that was there already.
    """

    name: str
    state: Literal["ran", "cached", "failed"]
    seconds: float
    tokens: int = 0
    peak_memory_gib: float = 0.0
    note: str = ""
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True, slots=True)
class Note:
    """A line for whoever watches the run."""

    text: str


@dataclass(frozen=True, slots=True)
class StageResumed:
    """The stage that runs goes on from what an earlier run saved.

    Attributes:
        step: The last step that is done already, counted over the whole run as `global_step` is.
    """

    step: int


@dataclass(frozen=True, slots=True)
class MachineSample:
    """What the machine was doing at some second of the run.

    Attributes:
        second: Since the run began.
        figures: By name, with the unit at its end: `memory_used_gib`.
    """

    second: int
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class ArtifactMade:
    """The stage that runs has made an artifact; one that it finds made already is not told.

    Attributes:
        folder: Where it lies in the store.
    """

    folder: Path


Event = StageStarted | StageRecord | StageResumed | StepReport | Note | MachineSample | ArtifactMade
Subscriber = Callable[[Event], None]

_subscribers: list[Subscriber] = []
_lock = threading.Lock()


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Calls `subscriber` with every event from now on, on the thread that publishes it.

    Returns:
        What ends that.
    """
    with _lock:
        _subscribers.append(subscriber)
    return lambda: unsubscribe(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Ends a subscription; nothing happens when there is none."""
    with _lock:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)


def publish(event: Event) -> None:
    """Hands an event to every subscriber; nothing happens when there is none.

    A subscriber that raises (a terminal that went away) is dropped and named in the log: showing
    a run must never end it.
    """
    with _lock:
        subscribers = tuple(_subscribers)
    # Called outside the lock: a subscriber may log, which takes the lock of a log handler, while
    # another thread that logs holds that one and publishes.
    for subscriber in subscribers:
        try:
            subscriber(event)
        except Exception:
            unsubscribe(subscriber)
            logger.info("a display failed and is switched off", exc_info=True)


def report(step: StepReport) -> None:
    """Publishes what a trainer says after a step."""
    publish(step)


class RunLog:
    """The log file of one run. A context manager; `close` puts the loggers back as they were.

    Attributes:
        folder: `runs/<utc timestamp>-<short id>` in the store.
        path: `run.log` in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "run.log"
        with storage_errors(self.path):
            folder.mkdir(parents=True)
            self._file = logging.FileHandler(self.path, encoding="utf-8", errors="backslashreplace")
        line = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
        self._file.setFormatter(logging.Formatter(line))
        self._notes = _NoteHandler(logging.WARNING)
        self._before: dict[str, tuple[list[logging.Handler], bool, int]] = {}
        logging.captureWarnings(True)
        self.route()
        self._unsubscribe = subscribe(self._route_again)

    @classmethod
    def start(cls, store: Store) -> "RunLog":
        """Opens the log of a new run in the store.

        Raises:
            StoreError: If the store cannot be written.
        """
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:6]}"
        return cls(store.runs / name)

    def route(self) -> None:
        """Sends the libraries' logging to the file alone; our warnings are published as notes too.

        Libraries install handlers of their own when they are imported, so this is done again
        whenever a stage starts.
        """
        for name in (*LIBRARIES, OURS):
            library = logging.getLogger(name)
            ours: list[logging.Handler] = [self._file]
            if name == OURS:
                ours.append(self._notes)
            if name not in self._before:
                self._before[name] = (library.handlers, library.propagate, library.level)
            if library.handlers != ours or library.propagate:
                library.handlers, library.propagate = ours, False
                library.setLevel(logging.INFO)

    def trace(self, error: BaseException) -> None:
        """Writes an error with its whole trace to the file, and nowhere else."""
        text = "the run failed\n" + "".join(traceback.format_exception(error)).rstrip()
        record = {"name": OURS, "levelno": logging.ERROR, "levelname": "ERROR", "msg": text}
        self._file.handle(logging.makeLogRecord(record))

    def close(self) -> None:
        """Puts the loggers back and closes the file; calling it again does nothing."""
        self._unsubscribe()
        for name, (handlers, propagate, level) in self._before.items():
            library = logging.getLogger(name)
            library.handlers, library.propagate = handlers, propagate
            library.setLevel(level)
        self._before = {}
        logging.captureWarnings(False)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _route_again(self, event: Event) -> None:
        if isinstance(event, StageStarted):
            self.route()


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        publish(Note(record.getMessage()))


@contextmanager
def redirect_descriptors(log_path: Path) -> Iterator[TextIO]:
    """Sends descriptors 1 and 2 to a file, for this process and those it starts from now on.

    Yields:
        A stream on what was descriptor 1, for the display alone.

    Raises:
        StoreError: If the file cannot be opened.
    """
    with storage_errors(log_path):
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {1: os.dup(1), 2: os.dup(2)}
    terminal = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
    try:
        for descriptor in saved:
            os.dup2(log, descriptor)
        yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in saved.items():
            os.dup2(original, descriptor)
            os.close(original)
        os.close(log)
        try:
            terminal.close()
        except OSError:
            logger.info("the terminal went away", exc_info=True)
