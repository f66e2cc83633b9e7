"""Displays of a run: one live line in a terminal, else one plain line per step."""

import math
import os
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from nemo_rl_core.store.manifest import Cost
from nemo_rl_core.telemetry.events import (
    Event,
    Note,
    StageRecord,
    StageStarted,
    subscribe,
)
from nemo_rl_core.types import StepReport

_STATE_STYLES = {"ran": "green", "cached": "cyan", "failed": "bold red"}


class Display(Protocol):
    """Shows the progress of a run."""

    def stage_started(self, name: str) -> None:
        """Shows the start of a stage."""

    def stage_finished(self, record: StageRecord) -> None:
        """Shows that a stage ran, was cached, or failed."""

    def step(self, report: StepReport) -> None:
        """Shows a finished step of a trainer."""

    def note(self, text: str) -> None:
        """Shows a line of text."""

    def close(self) -> None:
        """Restores the terminal."""


def choose_display(stream: TextIO) -> Display:
    """Returns a live display if `stream` is a terminal with cursor control, else a plain one."""
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return RichDisplay(stream)
    return PlainDisplay(stream)


def show_on(display: Display) -> Callable[[], None]:
    """Subscribes a display to the events of this process; returns the function to unsubscribe."""

    def show(event: Event) -> None:
        match event:
            case StageStarted(name):
                display.stage_started(name)
            case StageRecord():
                display.stage_finished(event)
            case StepReport():
                display.step(event)
            case Note(text):
                display.note(text)

    return subscribe(show)


class PlainDisplay:
    """One plain line per event.

    Example line: `train_sft 12/250  loss 0.913  84,210 tokens/s  0:31 left`
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._clock = stream, _TimeLeft()

    def stage_started(self, name: str) -> None:
        """Prints the stage's name."""
        self._write(f"{name}  started")

    def stage_finished(self, record: StageRecord) -> None:
        """Prints how the stage ended."""
        self._write(_finished(record))

    def step(self, report: StepReport) -> None:
        """Prints the step."""
        parts = [*_describe(report), self._clock.time_left(report)]
        counter = f"{report.stage} {report.step}/{report.num_steps}"
        self._write("  ".join([counter, *(part for part in parts if part)]))

    def note(self, text: str) -> None:
        """Prints the text."""
        self._write(text)

    def close(self) -> None:
        """Flushes the stream."""
        self._stream.flush()

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class RichDisplay:
    """One live line with the current step; finished stages and notes scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, markup=False, highlight=False, emoji=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}", markup=False),
            console=self._console,
            transient=True,
            refresh_per_second=4,
            # redirect_descriptors redirects the streams.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._clock = _TimeLeft()
        self._stage, self._task = "", TaskID(-1)
        self._resize()
        self._progress.start()

    def stage_started(self, name: str) -> None:
        """Shows an empty bar until the first step."""
        self._resize()
        self._end_stage()
        self._stage = name
        self._task = self._progress.add_task(name, total=None, status="")

    def stage_finished(self, record: StageRecord) -> None:
        """Prints how the stage ended, above the live line."""
        self._end_stage()
        self._console.print(Text(_finished(record), style=_STATE_STYLES[record.state]))

    def step(self, report: StepReport) -> None:
        """Moves the bar."""
        if report.stage != self._stage:
            self.stage_started(report.stage)
        self._resize()
        parts = [*_describe(report), self._clock.time_left(report)]
        self._progress.update(
            self._task,
            total=report.num_steps,
            completed=report.step,
            status="  ".join(
                [f"{report.step}/{report.num_steps}", *(part for part in parts if part)]
            ),
        )

    def note(self, text: str) -> None:
        """Prints the text above the live line."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Removes the live line."""
        self._end_stage()
        self._progress.stop()

    def _end_stage(self) -> None:
        if self._stage:
            self._progress.remove_task(self._task)
            self._stage = ""

    def _resize(self) -> None:
        # rich reads the size from descriptors 0 to 2, of which two may be redirected to the log.
        size = os.get_terminal_size(self._stream.fileno())
        if size.columns and size.lines:  # some pseudo-terminals have none, and would show nothing
            self._console.size = size


_PREFIXES = ("", "k", "M", "G", "T", "P", "E")

_COST_COLUMNS: tuple[tuple[str, Callable[[Cost], str]], ...] = (
    ("CPU s", lambda cost: f"{cost.cpu_seconds:.1f}" if cost.cpu_seconds else ""),
    ("GPU s", lambda cost: f"{cost.gpu_seconds:.1f}" if cost.gpu_seconds else ""),
    ("FLOPs", lambda cost: _scaled(cost.flops) if cost.flops else ""),
    ("MFU", lambda cost: f"{100 * cost.mfu:.1f} %" if cost.mfu is not None else ""),
    ("money", lambda cost: f"{cost.money:.4f} {cost.currency}" if cost.money is not None else ""),
)


def summary_table(records: Sequence[StageRecord]) -> Table:
    """Returns the table at the end of a run: one row per stage and the totals, no empty columns.

    Notes are left out: each was printed when its stage ended.
    """
    table = Table(title="stages")
    for heading in ("stage", "state"):
        table.add_column(heading, no_wrap=True)
    total = reduce(Cost.plus, (record.cost for record in records), Cost())
    costs = [total, *(record.cost for record in records)]
    shown = [column for column in _COST_COLUMNS if any(map(column[1], costs))]
    for heading in ("seconds", "tokens", "peak GiB", *(name for name, _ in shown)):
        table.add_column(heading, justify="right")
    for record in records:
        table.add_row(
            Text(record.name),
            Text(_state_label(record), style=_STATE_STYLES[record.state]),
            f"{record.seconds:.1f}",
            f"{record.tokens:,}" if record.tokens else "",
            _gib(record.peak_memory_gib),
            *(format_cost(record.cost) for _, format_cost in shown),
        )
    table.add_section()
    table.add_row(
        "total",
        "",
        f"{sum(record.seconds for record in records):.1f}",
        f"{sum(record.tokens for record in records):,}",
        _gib(max((record.peak_memory_gib for record in records), default=0.0)),
        *(format_cost(total) for _, format_cost in shown),
    )
    return table


def _gib(size: float) -> str:
    return f"{size:.2f}" if size else ""


def _scaled(flops: float) -> str:
    """Three digits with an SI prefix: 159 M, 2.1 T."""
    rounded = float(f"{flops:.3g}")  # rounded first, so that 999.9 G becomes 1 T and not 1e+03 G
    power = min(max(int(math.log10(rounded)) // 3, 0), len(_PREFIXES) - 1)
    return f"{rounded / 1000**power:.3g} {_PREFIXES[power]}".rstrip()


def _state_label(record: StageRecord) -> str:
    return record.state if record.state == "ran" else record.state.upper()


def _finished(record: StageRecord) -> str:
    parts = [f"{record.name}  {_state_label(record)}"]
    if record.state != "cached":
        parts.append(f"{record.seconds:.1f} s")
    return "  ".join([*parts, record.note] if record.note else parts)


def _describe(report: StepReport) -> list[str]:
    """Reward (or else loss) and speed of a step."""
    parts = [
        f"{key} {report.metrics[key]:.3f}" for key in ("reward", "loss") if key in report.metrics
    ][:1]
    if "tokens_per_second" in report.timings:
        parts.append(f"{report.timings['tokens_per_second']:,.0f} tokens/s")
    return parts


class _TimeLeft:
    """Time left, from the steps seen so far: a resumed stage does not start at step 0."""

    def __init__(self) -> None:
        self._stage, self._first_step, self._start = "", 0, 0.0

    def time_left(self, report: StepReport) -> str:
        now = time.monotonic()
        if report.stage != self._stage or report.step <= self._first_step:
            self._stage, self._first_step, self._start = report.stage, report.step, now
            return ""
        per_step = (now - self._start) / (report.step - self._first_step)
        seconds = round(per_step * (report.num_steps - report.step))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        clock = f"{minutes}:{seconds % 60:02d}"
        return f"{hours}:{clock:0>5} left" if hours else f"{clock} left"
