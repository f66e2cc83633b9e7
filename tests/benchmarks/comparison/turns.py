"""Runs programs in turns: each in a separate process, one at a time unless requested otherwise.

A side is a function that sets itself up, calls `Baton.wait`, and calls `Baton.done` at the end of
each of its turns. A turn is measured by its time and the CPU time of the side's process and all its
descendants. Between its turns a side is stopped by a signal, so that work after its steps counts
for itself and not for the others.
"""

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import psutil

_CONTEXT = multiprocessing.get_context("spawn")
_SECONDS_TO_END = 120.0


@dataclass(frozen=True)
class Turn:
    """One turn of a side: seconds, CPU-seconds, and the figures that the side reported."""

    wall: float
    cpu: float
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Side:
    """A function that takes turns, and its arguments after the baton; both are pickled."""

    run: Callable[..., None]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Baton:
    """Handed to a side, which waits for it and returns it.

    Args:
        connection: Connection to the measuring program.
        num_turns: Number of turns.

    Attributes:
        num_turns: Number of turns.
    """

    def __init__(self, connection: Connection, num_turns: int) -> None:
        self._connection, self.num_turns, self._left = connection, num_turns, num_turns

    def wait(self) -> None:
        """Reports that set-up has ended; returns when the first turn begins."""
        self._connection.send(("ready", {}))
        self._connection.recv()

    def done(self, **figures: float) -> None:
        """Ends a turn; returns when the next one begins, and immediately after the last."""
        self._connection.send(("done", figures))
        self._left -= 1
        if self._left:
            self._connection.recv()


class SideError(Exception):
    """A side failed; the message contains its log."""


def take_turns(
    sides: Mapping[str, Side],
    *,
    num_turns: int,
    logs: Path,
    num_warm: int = 1,
    at_once: Sequence[str] = (),
) -> dict[str, list[Turn]]:
    """Lets the sides take their turns one after the other, round by round.

    Args:
        sides: Sides by name.
        num_turns: Measured turns per side.
        logs: Folder for the output of the sides.
        num_warm: Warm-up turns, which are not measured.
        at_once: Sides that take their turns simultaneously, after the others.

    Returns:
        `num_turns` turns per side.

    Raises:
        SideError: If a side fails.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as ends:
        running = {}
        for name, side in sides.items():
            log = logs / f"{name.replace(' ', '_')}.log"
            running[name] = _Running(side, num_warm + num_turns, log)
            ends.callback(running[name].end)
            running[name].receive()
            running[name].stop()
        groups = [[each] for name, each in running.items() if name not in at_once]
        groups.append([running[name] for name in at_once])
        for _ in range(num_warm + num_turns):
            for group in groups:
                _take_turn(group)
        return {name: each.turns[num_warm:] for name, each in running.items()}


CpuTimes = dict[tuple[int, float], float]
"""CPU-seconds so far, by process id and start time."""


def cpu_times(process: psutil.Process) -> CpuTimes:
    """Returns the CPU times of a process and its running descendants."""
    seconds: CpuTimes = {}
    for each in _tree(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            seconds[each.pid, each.create_time()] = times.user + times.system
    return seconds


def _tree(process: psutil.Process) -> list[psutil.Process]:
    """Returns the process and all its descendants."""
    return [process, *process.children(recursive=True)]


def spent_between(before: CpuTimes, after: CpuTimes) -> float:
    """Returns the CPU-seconds spent by the processes that still run at the end.

    The time of processes that ended earlier is lost: their parents do not always wait for them.
    """
    return sum(seconds - before.get(each, 0.0) for each, seconds in after.items())


class _Running:
    """The process of a side, and its turns so far."""

    def __init__(self, side: Side, num_turns: int, log: Path) -> None:
        self._log = log
        self._connection, theirs = _CONTEXT.Pipe()
        arguments = (theirs, side, num_turns, str(log))
        self._process = _CONTEXT.Process(target=_child, args=arguments)
        before = {name: os.environ.get(name) for name in side.environment}
        os.environ.update(side.environment)
        try:
            self._process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        theirs.close()
        assert self._process.pid is not None
        self._tree = psutil.Process(self._process.pid)
        self.turns: list[Turn] = []

    def receive(self) -> dict[str, float]:
        """Receives the next report of the side, "ready" or "done"."""
        try:
            word, payload = self._connection.recv()
        except EOFError:
            word, payload = "failed", "it has ended"
        if word == "failed":
            tail = self._log.read_text(errors="replace")[-3000:]
            raise SideError(f"{payload}\n--- {self._log}:\n{tail}")
        figures: dict[str, float] = payload
        return figures

    def begin_turn(self) -> Connection:
        """Resumes the side; the connection becomes readable when its turn has ended."""
        self._before = cpu_times(self._tree)
        self._started = time.perf_counter()
        self.resume()
        self._connection.send("go")
        return self._connection

    def end_turn(self) -> None:
        """Waits for the end of the turn, then stops the side."""
        figures = self.receive()
        wall = time.perf_counter() - self._started
        self.stop()
        spent = spent_between(self._before, cpu_times(self._tree))
        self.turns.append(Turn(wall, spent, figures))

    def stop(self) -> None:
        """Stops all processes of the side."""
        for each in _tree(self._tree):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()

    def resume(self) -> None:
        """Resumes all processes of the side."""
        for each in reversed(_tree(self._tree)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()

    def end(self) -> None:
        """Waits for the process; kills it and its descendants if that takes too long."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.resume()
        self._connection.close()
        self._process.join(_SECONDS_TO_END)
        if self._process.is_alive():
            for each in [*self._tree.children(recursive=True), self._tree]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            self._process.join()


def _take_turn(group: Sequence[_Running]) -> None:
    """Runs one turn of each side at once; each is stopped when its turn has ended."""
    waiting = {each.begin_turn(): each for each in group}
    while waiting:
        for connection in wait(list(waiting)):
            waiting.pop(cast("Connection", connection)).end_turn()


def _child(connection: Connection, side: Side, num_turns: int, log: str) -> None:
    with Path(log).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        side.run(Baton(connection, num_turns), **side.arguments)
    except EOFError:  # the measuring program has ended
        pass
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        raise
