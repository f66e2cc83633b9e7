"""Displays of a run: one live line in a terminal (`RichDisplay`), else plain ones."""

import os
import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from nemo_rl_core.telemetry.display_lines import (
    STATE_STYLES,
    Now,
    StepThrottle,
    TimeLeft,
    is_verbose,
    stage_line,
    step_line,
    step_parts,
    validation_line,
)
from nemo_rl_core.telemetry.events import Event, Note, StageRecord, StageStarted, Waiting, subscribe
from nemo_rl_core.types import StepReport

_SECONDS_OF_SILENCE = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Seconds without output before each line about a wait in a plain display; the last one repeats."""
_SECONDS_OF_A_WAIT = 1.0
"""Minimum duration of waits that are shown."""
_TICK_SECONDS = 0.5


class PlainDisplay:
    """One plain line per event, and one after some seconds of silence.

    Of quick steps, one per 10 s or 5 % of the stage is printed, and the first and the last.

    Example lines:
        `train_sft 12/250  loss 0.913  84,210 tokens/s  0:31 left`
        `train_sft 50/250  validation: loss 0.3125`
        `evaluate  0:10  starting the engine`
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._clock = stream, TimeLeft()
        self._throttle = StepThrottle()
        self._omitted_step = ""
        self._now = Now()
        self._lock = threading.Lock()
        self._last_output, self._num_ticks = 0.0, 0
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
        self._write_omitted_step()  # the last one before a failure or a stop
        self._write(stage_line(record))

    def step(self, report: StepReport) -> None:
        """Prints the step, unless another one was printed just before."""
        line, validation = step_line(report, self._clock.time_left(report)), validation_line(report)
        if self._is_printed(report) or validation:
            self._omitted_step = ""
            self._write(line)
        else:
            self._omitted_step = line
            with self._lock:
                self._last_output, self._num_ticks = time.perf_counter(), 0
        if validation:
            self.note(validation)

    def waiting(self, wait: Waiting) -> None:
        """Records the wait, which is printed if it takes some seconds."""
        self._now.wait_for(wait)
        self._start_ticker()

    def note(self, text: str) -> None:
        """Prints the text, after the step that it may be about."""
        self._write_omitted_step()
        self._write(text)

    def close(self) -> None:
        """Stops the lines about waits and flushes the stream."""
        self._closed.set()
        self._stream.flush()

    def _write_omitted_step(self) -> None:
        if self._omitted_step:
            self._write(self._omitted_step)
            self._omitted_step = ""

    def _is_printed(self, report: StepReport) -> bool:
        return self._throttle.is_due(report)

    def _start_ticker(self) -> None:
        if self._ticker is None:
            self._last_output = time.perf_counter()
            self._ticker = threading.Thread(target=self._tick, name="display", daemon=True)
            self._ticker.start()

    def _write(self, line: str) -> None:
        with self._lock:
            self._last_output, self._num_ticks = time.perf_counter(), 0
            self._stream.write(line + "\n")
            self._stream.flush()

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_SECONDS):
            with self._lock:
                line = self._now.line()
                # Lines repeat soon only during a wait; slow steps print lines themselves.
                is_waiting = self._now.wait.text and self._now.seconds_waited >= _SECONDS_OF_A_WAIT
                tick = self._num_ticks if is_waiting else len(_SECONDS_OF_SILENCE)
                due = _SECONDS_OF_SILENCE[min(tick, len(_SECONDS_OF_SILENCE) - 1)]
                if not line or time.perf_counter() - self._last_output < due:
                    continue
                self._last_output = time.perf_counter()
                self._num_ticks += 1
                try:
                    self._stream.write(line + "\n")
                    self._stream.flush()
                except (OSError, ValueError):
                    return  # the terminal or pipe is closed; the run continues


class RichDisplay:
    """One live line with the current step; stages, validations and notes scroll above it.

    If it is verbose, so do the lines of steps that a `PlainDisplay` prints.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, markup=False, highlight=False, emoji=False)
        self._now = Now()
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
        self._clock, self._throttle = TimeLeft(), StepThrottle()
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
        self._console.print(Text(stage_line(record), style=STATE_STYLES[record.state]))

    def step(self, report: StepReport) -> None:
        """Moves the bar."""
        if not self._stage:
            self.stage_started(report.stage)
        self._resize()
        time_left = self._clock.time_left(report)
        if is_verbose() and self._throttle.is_due(report):
            self.note(step_line(report, time_left))
        if line := validation_line(report):
            self.note(line)
        parts = [*step_parts(report), time_left]
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
        # rich reads the size from descriptors 0 to 2, two of which may be redirected to the log.
        size = os.get_terminal_size(self._stream.fileno())
        if size.columns and size.lines:  # some pseudo-terminals have no size
            self._console.size = size


class _StatusColumn(ProgressColumn):
    """The last step, the current wait and the stage's time, updated in each frame."""

    def __init__(self, now: Now) -> None:
        super().__init__(Column(no_wrap=True))
        self._now = now

    def render(self, task: Task) -> Text:
        """Returns the text for the live line."""
        parts = [task.fields["status"], self._now.waited()]
        shown = [part for part in parts if part]
        if self._now.stage:
            shown.append(f"({self._now.elapsed})" if shown else self._now.elapsed)
        return Text("  ".join(shown))


Display = PlainDisplay | RichDisplay


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
