"""Displays of a run: one live line in a terminal, else one plain line per step.

Both say what is waited for, and since when. The live line does so four times a second, the plain
display only after some seconds of silence, and then ever more rarely: a log must not fill.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from nemo_rl_core.store.manifest import Cost
from nemo_rl_core.telemetry.events import (
    Event,
    Note,
    StageRecord,
    StageStarted,
    Waiting,
    subscribe,
)
from nemo_rl_core.types import StepReport

_STATE_STYLES = {"ran": "green", "cached": "cyan", "failed": "bold red", "stopped": "yellow"}
_SECONDS_OF_SILENCE = (5.0, 10.0, 20.0, 40.0, 60.0)
"""How long a plain display is silent before each line that says what is waited for; then the last
of these."""
_SECONDS_OF_A_WAIT = 1.0
"""A shorter one is over before its line is read."""
_TICK_SECONDS = 0.5


class Display(Protocol):
    """Shows the progress of a run."""

    def stage_started(self, name: str) -> None:
        """Shows the start of a stage."""

    def stage_finished(self, record: StageRecord) -> None:
        """Shows that a stage ran, was cached, failed, or was stopped."""

    def step(self, report: StepReport) -> None:
        """Shows a finished step of a trainer."""

    def waiting(self, wait: Waiting) -> None:
        """Shows what the run waits for, until it waits for something else or nothing."""

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
            case Waiting():
                display.waiting(event)
            case Note(text):
                display.note(text)

    return subscribe(show)


class PlainDisplay:
    """One plain line per event, and one after some seconds of silence.

    Example lines:
        `train_sft 12/250  loss 0.913  84,210 tokens/s  0:31 left`
        `evaluate  0:10  starting the engine`
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._clock = stream, _TimeLeft()
        self._now = _Now()
        self._lock = threading.Lock()
        self._spoke, self._num_ticks = 0.0, 0
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None

    def stage_started(self, name: str) -> None:
        """Prints the stage's name."""
        self._now.start(name)
        self._write(f"{name}  started")
        self._start_ticker()

    def stage_finished(self, record: StageRecord) -> None:
        """Prints how the stage ended."""
        self._now.start("")
        self._write(_finished(record))

    def step(self, report: StepReport) -> None:
        """Prints the step."""
        parts = [*_describe(report), self._clock.time_left(report)]
        counter = f"{report.stage} {report.step}/{report.num_steps}"
        self._write("  ".join([counter, *(part for part in parts if part)]))

    def waiting(self, wait: Waiting) -> None:
        """Has the wait printed if it takes some seconds."""
        self._now.wait_for(wait)
        self._start_ticker()

    def note(self, text: str) -> None:
        """Prints the text."""
        self._write(text)

    def close(self) -> None:
        """Ends the lines about waits, and flushes the stream."""
        self._closed.set()
        self._stream.flush()

    def _start_ticker(self) -> None:
        if self._ticker is None:
            self._spoke = time.perf_counter()
            self._ticker = threading.Thread(target=self._tick, name="display", daemon=True)
            self._ticker.start()

    def _write(self, line: str) -> None:
        with self._lock:
            self._spoke, self._num_ticks = time.perf_counter(), 0
            self._stream.write(line + "\n")
            self._stream.flush()

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_SECONDS):
            with self._lock:
                line = self._now.line()
                # Slow steps say enough themselves; a wait is what a reader asks about.
                is_waiting = self._now.wait.text and self._now.seconds_waited >= _SECONDS_OF_A_WAIT
                tick = self._num_ticks if is_waiting else len(_SECONDS_OF_SILENCE)
                due = _SECONDS_OF_SILENCE[min(tick, len(_SECONDS_OF_SILENCE) - 1)]
                if not line or time.perf_counter() - self._spoke < due:
                    continue
                self._spoke = time.perf_counter()
                self._num_ticks += 1
                try:
                    self._stream.write(line + "\n")
                    self._stream.flush()
                except (OSError, ValueError):
                    return  # the terminal or the pipe went away; the run goes on


class RichDisplay:
    """One live line with the current step; finished stages and notes scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, markup=False, highlight=False, emoji=False)
        self._now = _Now()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            _StatusColumn(self._now),
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
        """Shows a moving bar until the first step."""
        self._resize()
        self._end_stage()
        self._now.start(name)
        self._stage = name
        self._task = self._progress.add_task(name, total=None, status="")

    def stage_finished(self, record: StageRecord) -> None:
        """Prints how the stage ended, above the live line."""
        self._end_stage()
        self._console.print(Text(_finished(record), style=_STATE_STYLES[record.state]))

    def step(self, report: StepReport) -> None:
        """Moves the bar."""
        if not self._stage:
            self.stage_started(report.stage)
        self._resize()
        parts = [*_describe(report), self._clock.time_left(report)]
        self._progress.update(
            self._task,
            description=report.stage,
            total=report.num_steps,
            completed=report.step,
            status="  ".join(
                [f"{report.step}/{report.num_steps}", *(part for part in parts if part)]
            ),
        )

    def waiting(self, wait: Waiting) -> None:
        """Shows the wait after the bar, with the time since its start."""
        self._now.wait_for(wait)
        if wait.text and not self._stage and not self._progress.task_ids:
            self._task = self._progress.add_task("", total=None, status="")
        elif not wait.text and not self._stage:
            self._clear()

    def note(self, text: str) -> None:
        """Prints the text above the live line."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Removes the live line."""
        self._end_stage()
        self._progress.stop()

    def _end_stage(self) -> None:
        self._clear()
        self._stage = ""
        self._now.start("")

    def _clear(self) -> None:
        for task in self._progress.task_ids:
            self._progress.remove_task(task)

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


class _Now:
    """The stage that runs and what is waited for, each with the time since its start."""

    def __init__(self) -> None:
        self.stage, self.wait = "", Waiting("")
        self._stage_began = self._wait_began = time.perf_counter()

    def start(self, stage: str) -> None:
        """Begins a stage; "" for none."""
        self.stage, self._stage_began = stage, time.perf_counter()

    def wait_for(self, wait: Waiting) -> None:
        """Begins a wait, or takes how far the same one has come."""
        if wait.text != self.wait.text:
            self._wait_began = time.perf_counter()
        self.wait = wait

    @property
    def elapsed(self) -> str:
        """Time since the stage's start; empty where none runs."""
        return clock(time.perf_counter() - self._stage_began) if self.stage else ""

    @property
    def seconds_waited(self) -> float:
        """Time since the start of the wait."""
        return time.perf_counter() - self._wait_began

    def waited(self) -> str:
        """What is waited for, how far it is, and since when; empty for nothing."""
        if not self.wait.text:
            return ""
        parts = [self.wait.text, _amount(self.wait), clock(self.seconds_waited)]
        return "  ".join(part for part in parts if part)

    def line(self) -> str:
        """Both in a line; empty where nothing goes on.

        Example: `evaluate  0:12  starting the engine  0:10`
        """
        return "  ".join(part for part in (self.stage, self.elapsed, self.waited()) if part)


class _StatusColumn(ProgressColumn):
    """The last step, what is waited for, and the stage's time, drawn anew in each frame."""

    def __init__(self, now: _Now) -> None:
        super().__init__(Column(no_wrap=True))
        self._now = now

    def render(self, task: Task) -> Text:
        """The text for the live line."""
        parts = [task.fields["status"], self._now.waited()]
        shown = [part for part in parts if part]
        if self._now.stage:
            shown.append(f"({self._now.elapsed})" if shown else self._now.elapsed)
        return Text("  ".join(shown))


def _amount(wait: Waiting) -> str:
    """Such as `12.3 of 40.1 MB` or `3 of 7 files`; empty where nothing is counted."""
    if not wait.unit:
        return ""
    if wait.unit == "bytes":
        scale, unit = (1e9, "GB") if max(wait.done, wait.total or 0) >= 1e9 else (1e6, "MB")
        done, total = f"{wait.done / scale:,.1f}", f"{(wait.total or 0) / scale:,.1f}"
    else:
        unit, done, total = wait.unit, f"{wait.done:,.0f}", f"{wait.total or 0:,.0f}"
    return f"{done} {unit}" if wait.total is None else f"{done} of {total} {unit}"


def clock(seconds: float) -> str:
    """A duration as `0:05`, `12:34` or `1:02:03`."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    short = f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{short:0>5}" if hours else short


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
        return f"{clock(per_step * (report.num_steps - report.step))} left"
