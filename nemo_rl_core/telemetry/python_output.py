"""The output of a training started by a program or a notebook.

The program keeps its streams: its prints appear as usual, in a terminal above the live line. Output
of libraries and workers goes to the run's log: everything written to the descriptors 1 and 2 and to
`sys.stderr`, and Ray's copies of its workers' lines.
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
from nemo_rl_core.telemetry.display import Display, RichDisplay, choose_display, show_on
from nemo_rl_core.telemetry.display_lines import summary_table
from nemo_rl_core.telemetry.events import StageRecord
from nemo_rl_core.telemetry.notebook import NotebookDisplay, in_notebook
from nemo_rl_core.telemetry.run_log import redirect_descriptors

_RAY = "ray_"
"""Prefix of the names of Ray's threads that copy the output of workers."""


class ProgramOutput:
    """The display of one training."""

    def __init__(self, display: Display, stream: TextIO) -> None:
        self.display, self._stream = display, stream

    def closing(self, records: Sequence[StageRecord], lines: Sequence[str]) -> None:
        """Shows the table of the stages and lines below it."""
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
    """Shows events on stderr or in the notebook; redirects other output to the log."""
    original = sys.stdout, sys.stderr
    with ExitStack() as stack:
        screen = _screen(stack)
        terminal = stack.enter_context(redirect_descriptors(log_path))
        log = stack.enter_context(log_path.open("a", buffering=1, encoding="utf-8"))
        display = NotebookDisplay() if in_notebook() else choose_display(screen)
        stack.callback(display.close)
        stack.callback(show_on(display))
        printed = terminal if _is_on(original[0], 1) else original[0]
        note = display.note if isinstance(display, RichDisplay) and printed.isatty() else None
        shown = _Printed(printed, log, note), _Printed(screen, log, note)
        hidden = _Printed(log, log, None)
        sys.stdout, sys.stderr = shown[0], hidden
        stack.enter_context(_root_handlers_on(original, shown[1]))
        try:
            yield ProgramOutput(display, screen)
        finally:
            sys.stdout, sys.stderr = original
            for stream, before in zip((*shown, hidden), (*original, original[1]), strict=True):
                stream.end(before)


def _screen(stack: ExitStack) -> TextIO:
    """Returns a stream to the current stderr that remains after redirecting descriptors."""
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
def _root_handlers_on(original: tuple[Any, Any], stream: "_Printed") -> Iterator[None]:
    """Redirects handlers of the program's own logging, so that it appears, too."""
    redirected = [
        (each, each.stream)
        for each in logging.getLogger().handlers
        if isinstance(each, logging.StreamHandler) and each.stream in original
    ]
    for handler, _ in redirected:
        handler.setStream(stream)
    try:
        yield
    finally:
        for handler, before in redirected:
            handler.setStream(before)


class _Printed(io.TextIOBase):
    """The program's output, separated from Ray's, with full lines above a live display if any."""

    def __init__(self, stream: TextIO, log: TextIO, note: Callable[[str], None] | None) -> None:
        self._stream, self._log, self._note = stream, log, note
        self._begun = ""

    def end(self, stream: TextIO) -> None:
        """Forwards further output to a stream, for libraries that keep this `sys.stdout`."""
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
