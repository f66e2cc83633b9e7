"""Orderly end of a run that is stopped from outside, by Ctrl-C or SIGTERM, with a message.

The first signal raises `KeyboardInterrupt` in the main thread, the only exception that Ray passes
on from its calls. A second signal ends the process immediately.
"""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import click

from nemo_rl_core.telemetry.console import short_command

_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_SHELLS_OFFSET = 128  # what a shell adds to the number of the signal that ended a command
_CLEAR_LINE = b"\r\x1b[K"
_CLEAR_LINE_AND_SHOW_CURSOR = _CLEAR_LINE + b"\x1b[?25h"
_PROGRAMS = ("pyflyte", "nemo-rl")


class StopSignals:
    """Handles Ctrl-C and SIGTERM during a run. A context manager.

    Within a command of pyflyte or nemo-rl a stopped run ends the process with exit code 130 or 143.
    Elsewhere, as in a notebook, Ctrl-C passes on as `KeyboardInterrupt`.

    Args:
        ask: Called at the first SIGTERM instead of an interruption: asks the work to save and to
            raise `KeyboardInterrupt` itself. Returns whether it will.

    Attributes:
        received: The first signal; None if there was none.
    """

    def __init__(self, ask: Callable[[], bool] | None = None) -> None:
        self._ask = ask
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._terminal: int | None = None

    def report_to(self, terminal: int | None) -> None:
        """Sets the descriptor for the message that a signal was received; None for none."""
        self._terminal = terminal

    def stopped_by(self, error: BaseException) -> signal.Signals | None:
        """Returns the signal that caused an error; None if the run failed by itself."""
        if self.received is not None:
            return self.received
        if isinstance(error, KeyboardInterrupt):
            return signal.SIGINT
        # Ray's own handler, just before its start is complete.
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            return signal.SIGTERM
        return None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # A shell makes a command in the background ignore Ctrl-C, and so does nohup.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        stopped = self.stopped_by(error) if error is not None else None
        if stopped is None:
            return
        if stopped is signal.SIGTERM or click.get_current_context(silent=True) is not None:
            raise SystemExit(_SHELLS_OFFSET + stopped) from error

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            self._say("stopped at once; the same command resumes from the last save", cursor=True)
            os._exit(_SHELLS_OFFSET + number)
        self.received = signal.Signals(number)
        self._say(
            f"{_SIGNALS[self.received]}: stopping gracefully; a second signal stops the run at once"
        )
        if self.received is signal.SIGTERM and self._ask is not None and self._ask():
            return
        raise KeyboardInterrupt

    def _say(self, text: str, *, cursor: bool = False) -> None:
        """Writes without the display, whose locks the interrupted code may hold."""
        if self._terminal is None:
            return
        with suppress(OSError):
            if os.isatty(self._terminal):
                os.write(self._terminal, _CLEAR_LINE_AND_SHOW_CURSOR if cursor else _CLEAR_LINE)
            os.write(self._terminal, f"{text}\n".encode())


@dataclass
class StopPosition:
    """Position of a run when it was stopped, and its saved progress.

    Attributes:
        step: Its last finished step, from 1; 0 before any.
        num_steps_before: Steps of the full run before this stage; None while unknown.
        saved: Number over the full run of the last step that was saved; None for no save.
        waited_for: Event that the run waited for; empty for none.
        num_finished: Stages that ended before, or were cached.
    """

    stage: str = ""
    step: int = 0
    num_steps: int = 0
    num_steps_before: int | None = None
    saved: int | None = None
    waited_for: str = ""
    num_finished: int = 0

    def describe(self) -> str:
        """Describes the position, such as "at step 16 of 30 of grpo_iteration 1"."""
        if not self.stage:
            return "between two stages" if self.num_finished else "before its first stage"
        if self.step:
            return f"at step {self.step} of {self.num_steps} of {self.stage}"
        during = f" while {self.waited_for}" if self.waited_for else ""
        return f"in {self.stage}{during}"

    def describe_saves(self) -> str:
        """Describes saves, such as "step 15 of grpo_iteration 1, and the 4 stages before it"."""
        stages = {0: "", 1: "the stage before it"}.get(
            self.num_finished, f"the {self.num_finished} stages before it"
        )
        if not self.stage:
            return stages.replace(" before it", "") or "nothing yet"
        if self.saved is None:
            kept = f"{stages}; " if stages else ""
            return f"{kept}{self.stage} has no save yet and will restart"
        step = f"step {self.saved - (self.num_steps_before or 0)}"
        if self.num_steps_before is None:
            step += " of the full run, in"
        else:
            step += " of"
        return f"{step} {self.stage}" + (f", and {stages}" if stages else "")


def stopped_lines(number: signal.Signals, position: StopPosition, *, seconds: float) -> list[str]:
    """Returns the message of a stopped run: its position, its saves, and how to resume."""
    where = f"({_SIGNALS[number]}) {position.describe()}"
    return [
        f"stopped from outside {where}, after {_spoken(seconds)}",
        f"  saved: {position.describe_saves()}",
        f"  resume with: {typed_command(sys.orig_argv)}",
    ]


def typed_command(arguments: Sequence[str]) -> str:
    """Returns the command that was typed, for a shell.

    Example:
        >>> typed_command(["/venv/bin/python", "/venv/bin/nemo-rl", "run", "grpo", "seed=3"])
        '/venv/bin/nemo-rl run grpo seed=3'
    """
    if not arguments[1:] or Path(arguments[1]).name not in _PROGRAMS:
        return shlex.join(arguments)
    return f"{short_command(Path(arguments[1]))} {shlex.join(arguments[2:])}"


def _spoken(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (left, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"
