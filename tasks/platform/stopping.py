"""A run that is stopped from outside, by Ctrl-C or SIGTERM: it ends in order, and says so.

The first signal raises `KeyboardInterrupt` in the main thread, the one exception that Ray passes
on from its calls. A second one ends the process at once.
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

_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_SHELLS_OFFSET = 128  # what a shell adds to the number of the signal that ended a command
_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"
_PROGRAMS = ("pyflyte", "nemo-rl")


class StopSignals:
    """Takes Ctrl-C and SIGTERM while a run goes on. A context manager.

    Within a command of pyflyte or nemo-rl a stopped run ends the process with exit code 130 or 143.
    Elsewhere, as in a notebook, Ctrl-C passes on as `KeyboardInterrupt`.

    Args:
        ask: Called at the first SIGTERM in place of an interruption: asks the work to save and to
            raise `KeyboardInterrupt` itself. Returns whether it will.

    Attributes:
        received: The first signal; None if there was none.
    """

    def __init__(self, ask: Callable[[], bool] | None = None) -> None:
        self._ask = ask
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._terminal: int | None = None

    def speak_to(self, terminal: int | None) -> None:
        """Names the descriptor that says at once that a signal was taken; None for none."""
        self._terminal = terminal

    def stopped_by(self, error: BaseException) -> signal.Signals | None:
        """The signal that caused an error; None if the run failed by itself."""
        if self.received is not None:
            return self.received
        if isinstance(error, KeyboardInterrupt):
            return signal.SIGINT
        # Ray's own handler, in the moment before its start is over.
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            return signal.SIGTERM
        return None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # A shell has a command in the background ignore Ctrl-C, and so does nohup.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take)
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

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            self._say("stopped at once; the same command goes on from the last save", cursor=True)
            os._exit(_SHELLS_OFFSET + number)
        self.received = signal.Signals(number)
        self._say(f"{_SIGNALS[self.received]}: the run stops in order; once more stops it at once")
        if self.received is signal.SIGTERM and self._ask is not None and self._ask():
            return
        raise KeyboardInterrupt

    def _say(self, text: str, *, cursor: bool = False) -> None:
        """Writes past the display, whose locks the interrupted code may hold."""
        if self._terminal is None:
            return
        with suppress(OSError):
            if os.isatty(self._terminal):
                os.write(self._terminal, _SHOW_CURSOR if cursor else _SHOW_CURSOR[:4])
            os.write(self._terminal, f"{text}\n".encode())


@dataclass
class StopPlace:
    """Where a run was when it was stopped, and what it has saved.

    Attributes:
        stage: The stage that ran; empty between two.
        step: Its last finished step, from 1; 0 before any.
        num_steps: Of the stage; 0 while unknown.
        first_step: Number over the whole run of the stage's first step, less 1; None while unknown.
        saved: Number over the whole run of the last step that was saved; None for no save.
        waited_for: What the run waited for; empty for nothing.
        num_finished: Stages that ended before, or were cached.
    """

    stage: str = ""
    step: int = 0
    num_steps: int = 0
    first_step: int | None = None
    saved: int | None = None
    waited_for: str = ""
    num_finished: int = 0

    def where(self) -> str:
        """Such as "at step 16 of 30 of grpo_iteration 1"."""
        if not self.stage:
            return "between two stages" if self.num_finished else "before its first stage"
        if self.step:
            return f"at step {self.step} of {self.num_steps} of {self.stage}"
        during = f" while {self.waited_for}" if self.waited_for else ""
        return f"in {self.stage}{during}"

    def what_is_saved(self) -> str:
        """Such as "step 15 of grpo_iteration 1, and the 4 stages before it"."""
        stages = {0: "", 1: "the stage before it"}.get(
            self.num_finished, f"the {self.num_finished} stages before it"
        )
        if not self.stage:
            return stages.replace(" before it", "") or "nothing yet"
        if self.saved is None:
            kept = f"{stages}; " if stages else ""
            return f"{kept}of {self.stage} nothing yet, it begins again"
        step = f"step {self.saved - (self.first_step or 0)}"
        if self.first_step is None:
            step += " of the whole run, in"
        else:
            step += " of"
        return f"{step} {self.stage}" + (f", and {stages}" if stages else "")


def stopped_lines(number: signal.Signals, place: StopPlace, *, seconds: float) -> list[str]:
    """What a stopped run says: where it was, what is saved, and how to go on."""
    return [
        f"stopped from outside ({_SIGNALS[number]}) {place.where()}, after {_spoken(seconds)}",
        f"  saved: {place.what_is_saved()}",
        f"  go on with: {typed_command(sys.orig_argv)}",
    ]


def typed_command(arguments: Sequence[str]) -> str:
    """The command that was typed, for a shell.

    Args:
        arguments: `sys.orig_argv`, whose first is the interpreter.

    Example:
        >>> typed_command(["/venv/bin/python", "/venv/bin/nemo-rl", "run", "grpo", "seed=3"])
        '/venv/bin/nemo-rl run grpo seed=3'
    """
    scripts = [part for part in arguments[1:2] if Path(part).name in _PROGRAMS]
    return shlex.join(arguments[1:] if scripts else arguments)


def _spoken(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (left, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"
