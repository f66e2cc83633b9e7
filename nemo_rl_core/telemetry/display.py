"""Displays of a run: one live line in a terminal (`live_display.py`), else one plain line per step.

Both say what is waited for, and since when. The live line does so four times a second, the plain
display only after some seconds of silence, and then ever more rarely: a log must not fill.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from nemo_rl_core.telemetry.display_lines import (
    Now,
    TimeLeft,
    stage_line,
    step_parts,
    validation_line,
)
from nemo_rl_core.telemetry.events import (
    Event,
    Note,
    StageRecord,
    StageStarted,
    Waiting,
    subscribe,
)
from nemo_rl_core.telemetry.live_display import RichDisplay
from nemo_rl_core.types import StepReport

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
        `train_sft 50/250  validation: loss 0.3125`
        `evaluate  0:10  starting the engine`
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._clock = stream, TimeLeft()
        self._now = Now()
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
        self._write(stage_line(record))

    def step(self, report: StepReport) -> None:
        """Prints the step."""
        parts = [*step_parts(report), self._clock.time_left(report)]
        counter = f"{report.stage} {report.step}/{report.num_steps}"
        self._write("  ".join([counter, *(part for part in parts if part)]))
        if line := validation_line(report):
            self.note(line)

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
