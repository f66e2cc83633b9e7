"""The log file of a run: logging of libraries, and stdout and stderr.

Output of C++ code and child processes is captured by redirecting the descriptors. This must happen
before Ray starts, since a child inherits the descriptors.
"""

import logging
import os
import sys
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TextIO

from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.store.files import storage_errors
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.events import Event, Note, StageStarted, publish, subscribe

logger = logging.getLogger(__name__)

LIBRARIES = (
    "ray",
    "vllm",
    "flytekit",
    "transformers",
    "datasets",
    "huggingface_hub",
    "httpx",
    "httpx2",
    "py.warnings",
)
OURS = "nemo_rl_core"

_open: "list[RunLog]" = []


def is_logging() -> bool:
    """Whether a run of this process has its log open."""
    return bool(_open)


class _RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))  # httpx logs the address of each request


class RunLog:
    """The log `run.log` in the folder of a run. A context manager; `close` restores the loggers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "run.log"
        with storage_errors(self.path):
            folder.mkdir(parents=True)
            self._file = logging.FileHandler(self.path, encoding="utf-8", errors="backslashreplace")
        line = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
        self._file.setFormatter(_RedactingFormatter(line))
        self._notes = _NoteHandler(logging.WARNING)
        self._before: dict[str, tuple[list[logging.Handler], bool, int]] = {}
        logging.captureWarnings(True)
        self.route()
        self._unsubscribe = subscribe(self._route_again)
        _open.append(self)

    @classmethod
    def start(cls, store: Store) -> "RunLog":
        """Opens the log of a new run in the store."""
        with storage_errors(store.root):
            store.create()
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:6]}"
        return cls(store.runs / name)

    def route(self) -> None:
        """Routes the libraries' logging to the file; also publishes our warnings as notes.

        Libraries install handlers when they are imported, so this is repeated at the start of every
        stage.
        """
        for name in (*LIBRARIES, OURS):
            library = logging.getLogger(name)
            handlers: list[logging.Handler] = [self._file]
            if name == OURS:
                handlers.append(self._notes)
            if name not in self._before:
                self._before[name] = (library.handlers, library.propagate, library.level)
            if library.handlers != handlers or library.propagate:
                library.handlers, library.propagate = handlers, False
                # At INFO flytekit writes the complete config of each task.
                library.setLevel(logging.WARNING if name == "flytekit" else logging.INFO)

    def trace(self, error: BaseException) -> None:
        """Writes an error with its traceback to the file only."""
        text = "the run failed\n" + "".join(traceback.format_exception(error)).rstrip()
        record = {"name": OURS, "levelno": logging.ERROR, "levelname": "ERROR", "msg": text}
        self._file.handle(logging.makeLogRecord(record))

    def close(self) -> None:
        """Restores the loggers and closes the file; idempotent."""
        self._unsubscribe()
        if self in _open:
            _open.remove(self)
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
    """Redirects stdout and stderr (descriptors 1 and 2) to a file, also for later child processes.

    Yields a stream on the original descriptor 1, for the display.
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
            logger.info("the terminal is closed", exc_info=True)
