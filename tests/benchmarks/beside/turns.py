"""Programs that take turns: each in a process of its own, and one at a time unless asked otherwise.

A side is a function that sets itself up, calls `Baton.wait`, and `Baton.done` at the end of each of
its turns. What is measured of a turn is its time and the CPU time of its process and of all below
it. Between its turns a side is stopped by a signal, so that what it does behind its steps counts as
its own and not as the others'.
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
    """One turn of a side: seconds, CPU-seconds, and what the side said of it."""

    wall: float
    cpu: float
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Side:
    """A function that takes turns, and its arguments behind the baton; both are pickled."""

    run: Callable[..., None]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Baton:
    """What a side waits for, and gives back.

    Args:
        connection: To the program that measures.
        num_turns: How many turns there are.

    Attributes:
        num_turns: The same.
    """

    def __init__(self, connection: Connection, num_turns: int) -> None:
        self._connection, self.num_turns, self._left = connection, num_turns, num_turns

    def wait(self) -> None:
        """The set-up has ended; returns when the first turn begins."""
        self._connection.send(("ready", {}))
        self._connection.recv()

    def done(self, **figures: float) -> None:
        """A turn has ended; returns when the next one begins, and at once behind the last."""
        self._connection.send(("done", figures))
        self._left -= 1
        if self._left:
            self._connection.recv()


class SideError(Exception):
    """A side has failed; the message has its log."""


def take_turns(
    sides: Mapping[str, Side],
    *,
    num_turns: int,
    logs: Path,
    num_warm: int = 1,
    at_once: Sequence[str] = (),
) -> dict[str, list[Turn]]:
    """Has the sides take their turns one after the other, round by round.

    Args:
        sides: By name.
        num_turns: Turns of each that are measured.
        logs: A folder for what the sides print.
        num_warm: Turns before that, which are not.
        at_once: Sides that take their turns beside each other, after the others.

    Returns:
        `num_turns` turns a side.

    Raises:
        SideError: If one fails.
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
"""CPU-seconds so far, by process: its number and when it began."""


def cpu_times(process: psutil.Process) -> CpuTimes:
    """Of a process and of all that run below it, without those that have ended."""
    found: CpuTimes = {}
    for each in _tree(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            found[each.pid, each.create_time()] = times.user + times.system
    return found


def _tree(process: psutil.Process) -> list[psutil.Process]:
    """Itself first, and all below it."""
    return [process, *process.children(recursive=True)]


def spent_between(before: CpuTimes, after: CpuTimes) -> float:
    """CPU-seconds of the processes that are there at the end.

    What a process had spent when it ended is lost: its parent does not always wait for it.
    """
    return sum(seconds - before.get(each, 0.0) for each, seconds in after.items())


class _Running:
    """A side's process, and its turns so far."""

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
        """What the side says next, in words "ready" or "done"."""
        try:
            word, said = self._connection.recv()
        except EOFError:
            word, said = "failed", "it has ended"
        if word == "failed":
            tail = self._log.read_text(errors="replace")[-3000:]
            raise SideError(f"{said}\n--- {self._log}:\n{tail}")
        figures: dict[str, float] = said
        return figures

    def begin_turn(self) -> Connection:
        """Lets the side go on; the connection can be read when its turn has ended."""
        self._before = cpu_times(self._tree)
        self._started = time.perf_counter()
        self.go_on()
        self._connection.send("go")
        return self._connection

    def end_turn(self) -> None:
        """Waits for the end of the turn, and stops the side there."""
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

    def go_on(self) -> None:
        """Has them go on."""
        for each in reversed(_tree(self._tree)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()

    def end(self) -> None:
        """Waits for the process, and ends it and what it started where that takes too long."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.go_on()
        self._connection.close()
        self._process.join(_SECONDS_TO_END)
        if self._process.is_alive():
            for each in [*self._tree.children(recursive=True), self._tree]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            self._process.join()


def _take_turn(group: Sequence[_Running]) -> None:
    """One turn of each, all at once; each is stopped when its own has ended."""
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
    except EOFError:  # the program that measures has ended
        pass
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        raise
