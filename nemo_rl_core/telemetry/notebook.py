"""The display of a run in a Jupyter notebook: one cell output that is updated."""

import io
import sys
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text

from nemo_rl_core.telemetry.display import PlainDisplay
from nemo_rl_core.telemetry.events import StageRecord
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
        columns = [[_text(cell) for cell in each.cells] for each in table.columns]
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


def _text(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)
