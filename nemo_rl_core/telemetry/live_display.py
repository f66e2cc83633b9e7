"""The live line of a run in a terminal."""

import os
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from nemo_rl_core.telemetry.display_lines import (
    STATE_STYLES,
    Now,
    TimeLeft,
    stage_line,
    step_parts,
    validation_line,
)
from nemo_rl_core.telemetry.events import (
    StageRecord,
    Waiting,
)
from nemo_rl_core.types import StepReport


class RichDisplay:
    """One live line with the current step; stages, validations and notes scroll above it."""

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
        self._clock = TimeLeft()
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
        if line := validation_line(report):
            self.note(line)
        parts = [*step_parts(report), self._clock.time_left(report)]
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


class _StatusColumn(ProgressColumn):
    """The last step, what is waited for, and the stage's time, drawn anew in each frame."""

    def __init__(self, now: Now) -> None:
        super().__init__(Column(no_wrap=True))
        self._now = now

    def render(self, task: Task) -> Text:
        """The text for the live line."""
        parts = [task.fields["status"], self._now.waited()]
        shown = [part for part in parts if part]
        if self._now.stage:
            shown.append(f"({self._now.elapsed})" if shown else self._now.elapsed)
        return Text("  ".join(shown))
