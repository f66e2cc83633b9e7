"""The output of a training started by a program or a notebook, and the notebook's display.

The program keeps its streams: its prints appear as usual, in a terminal above the live line. Output
of libraries and workers goes to the run's log: everything written to the descriptors 1 and 2 and to
`sys.stderr`, and Ray's copies of its workers' lines.
"""

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from nemo_rl_core.telemetry.console import console_on
from nemo_rl_core.telemetry.display import (
    Display,
    PlainDisplay,
    RichDisplay,
    choose_display,
    show_on,
)
from nemo_rl_core.telemetry.display_lines import summary_table
from nemo_rl_core.telemetry.events import StageRecord
from nemo_rl_core.telemetry.run_log import redirect_descriptors
from nemo_rl_core.types import StepReport

_SECONDS_BETWEEN = 0.25
_STYLE = "font-family:monospace;white-space:pre-wrap"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookDisplay(PlainDisplay):
    """Shows one line per finished stage and the last line of the running one.

    It needs no widgets: the cell's output is replaced (`update_display_data`), for steps at most
    four times per second. A saved notebook keeps only the last state.
    """

    def __init__(self) -> None:
        super().__init__(_Lines(self._take))  # type: ignore[arg-type]
        import IPython.display

        shown: Any = IPython.display
        self._html: Any = shown.HTML
        self._handle: Any = shown.display(shown.HTML(""), display_id=True)
        self._notes: list[str] = []
        self._finished: list[str] = []
        self._last = self._bar = self._closing = ""
        self._shown = 0.0

    def stage_started(self, name: str) -> None:
        """Shows the name of the stage."""
        super().stage_started(name)
        self._show()

    def stage_finished(self, record: StageRecord) -> None:
        """Shows how the stage ended."""
        super().stage_finished(record)
        self._finished.append(self._last)
        self._last = self._bar = ""
        self._show()

    def step(self, report: StepReport) -> None:
        """Moves the bar."""
        self._bar = f'<progress value="{report.step}" max="{report.num_steps}"></progress> '
        super().step(report)

    def note(self, text: str) -> None:
        """Shows a line of text."""
        self._notes.append(text)
        self._show()

    def close(self) -> None:
        """Removes the bar."""
        super().close()
        self._last = self._bar = ""
        self._show()

    def show_table(self, table: Table, lines: Sequence[str]) -> None:
        """Shows the stages as a table instead of their lines, and lines below it."""
        headings = "".join(f"<th>{escape(str(each.header))}</th>" for each in table.columns)
        columns = [[_cell_text(cell) for cell in each.cells] for each in table.columns]
        rows = [
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in zip(*columns, strict=True)
        ]
        self._closing = f"<table><tr>{headings}</tr>{''.join(rows)}</table>" + _divisions(lines)
        self._finished = []
        self._show()

    def _is_printed(self, report: StepReport) -> bool:
        return True

    def _take(self, line: str) -> None:
        self._last = line
        if time.monotonic() - self._shown > _SECONDS_BETWEEN:
            self._show()

    def _show(self) -> None:
        self._shown = time.monotonic()
        running = f"<div>{self._bar}{escape(self._last)}</div>" if self._last else ""
        text = _divisions([*self._notes, *self._finished]) + running + self._closing
        self._handle.update(self._html(f'<div style="{_STYLE}">{text}</div>'))


class _Lines(io.TextIOBase):
    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take

    def write(self, text: str) -> int:
        self._take(text.rstrip("\n"))
        return len(text)


def _divisions(lines: Sequence[str]) -> str:
    return "".join(f"<div>{escape(line)}</div>" for line in lines)


def _cell_text(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


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
