"""The output of a training that a program or a notebook has started.

The program keeps its streams: what it prints appears where it would, in a terminal above the live
line. The output of libraries and workers goes to the run's log: what is written to the descriptors
1 and 2 and to `sys.stderr`, and Ray's copies of its workers' lines.
"""

import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from nemo_rl_core.telemetry.console import console_on
from nemo_rl_core.telemetry.display import Display, choose_display, show_on
from nemo_rl_core.telemetry.display_lines import summary_table
from nemo_rl_core.telemetry.events import StageRecord
from nemo_rl_core.telemetry.live_display import RichDisplay
from nemo_rl_core.telemetry.notebook import NotebookDisplay, in_notebook
from nemo_rl_core.telemetry.run_log import redirect_descriptors

_RAY = "ray_"
"""Ray's threads that copy the output of workers have names that begin with this."""


class ProgramOutput:
    """The display of one training.

    Attributes:
        display: Shows events.
    """

    def __init__(self, display: Display, stream: TextIO) -> None:
        self.display, self._stream = display, stream

    def closing(self, records: Sequence[StageRecord], lines: Sequence[str]) -> None:
        """Shows the table of the stages, and lines below it."""
        self.display.close()
        table = summary_table(records)
        if isinstance(self.display, NotebookDisplay):
            self.display.show_table(table, lines)
            return
        console = console_on(self._stream)
        console.print(table)
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)


@contextmanager
def program_output(log_path: Path) -> Iterator[ProgramOutput]:
    """Shows events within it on stderr or in the notebook; other output goes to the log.

    Raises:
        StoreError: If the log cannot be opened.
    """
    given = sys.stdout, sys.stderr
    with ExitStack() as stack:
        screen = _screen(stack)
        terminal = stack.enter_context(redirect_descriptors(log_path))
        log = stack.enter_context(log_path.open("a", buffering=1, encoding="utf-8"))
        display = NotebookDisplay() if in_notebook() else choose_display(screen)
        stack.callback(display.close)
        stack.callback(show_on(display))
        printed = terminal if _is_on(given[0], 1) else given[0]
        note = display.note if isinstance(display, RichDisplay) and printed.isatty() else None
        shown = _Printed(printed, log, note), _Printed(screen, log, note)
        hidden = _Printed(log, log, None)
        sys.stdout, sys.stderr = shown[0], hidden
        stack.enter_context(_root_handlers_on(given, shown[1]))
        try:
            yield ProgramOutput(display, screen)
        finally:
            sys.stdout, sys.stderr = given
            for stream, before in zip((*shown, hidden), (*given, given[1]), strict=True):
                stream.end(before)


def _screen(stack: ExitStack) -> TextIO:
    """The stream that stderr is now, which stays after descriptors are redirected."""
    if not _is_on(sys.stderr, 2):
        return sys.stderr
    stream = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
    return stack.enter_context(stream)


def _is_on(stream: Any, descriptor: int) -> bool:
    try:
        return bool(stream.fileno() == descriptor)
    except (AttributeError, OSError, ValueError):
        return False


@contextmanager
def _root_handlers_on(given: tuple[Any, Any], stream: "_Printed") -> Iterator[None]:
    """The program's own logging appears, too: its handlers write to the redirected streams."""
    moved = [
        (each, each.stream)
        for each in logging.getLogger().handlers
        if isinstance(each, logging.StreamHandler) and each.stream in given
    ]
    for handler, _ in moved:
        handler.setStream(stream)
    try:
        yield
    finally:
        for handler, before in moved:
            handler.setStream(before)


class _Printed(io.TextIOBase):
    """What the program prints, without what Ray prints.

    Args:
        stream: Where it goes.
        log: Where Ray's lines go.
        note: Shows a whole line above a live display on the same terminal; None without one.
    """

    def __init__(self, stream: TextIO, log: TextIO, note: Callable[[str], None] | None) -> None:
        self._stream, self._log, self._note = stream, log, note
        self._begun = ""

    def end(self, stream: TextIO) -> None:
        """Passes all on to a stream from now on: libraries keep `sys.stdout` as they found it."""
        self.flush()
        self._stream, self._log, self._note = stream, stream, None

    def write(self, text: str) -> int:
        if threading.current_thread().name.startswith(_RAY):
            self._log.write(text)
        elif self._note is None:
            self._stream.write(text)
        else:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                self._note(line)
        return len(text)

    def flush(self) -> None:
        if self._begun and self._note is not None:
            self._note(self._begun)
            self._begun = ""
        self._stream.flush()

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"
