"""Measures a complete command: seconds, and CPU time of it and all its descendants."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.comparison.turns import CpuTimes, SideError, cpu_times

REPOSITORY = Path(__file__).resolve().parents[3]
_BECOME_SUBREAPER = 36  # prctl(PR_SET_CHILD_SUBREAPER)
_SECONDS_TO_END = 30.0
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Spent:
    """Wall and CPU seconds of a command."""

    wall: float
    cpu: float


def spent_by(
    command: Sequence[str],
    environment: Mapping[str, str],
    logs: Path,
    *,
    until: Callable[[], bool] | None = None,
) -> Spent:
    """Runs a command to its end, or until a condition holds, and then stops it.

    Processes that outlive their parents are adopted by this one, so that their CPU time counts.
    Ray's raylet does not wait for its workers, whose CPU time would be lost; it is read twice a
    second while they run.

    Args:
        command: The program and its arguments.
        environment: Variables added to those of this process.
        logs: Folder for its output.
        until: Condition, checked twenty times a second.

    Raises:
        SideError: If the command fails or ends too early.
    """
    ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{Path(command[0]).name}.log"
    before, others = os.times(), set(psutil.Process().children())
    started = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if until is not None:
                cpu = _wait_until(process, until, log)
                return Spent(time.perf_counter() - started, cpu)
            code, seen = _watched(process, others)
            wall = time.perf_counter() - started
        finally:
            _end(process, others)
    if code != 0:
        raise SideError(f"{command[0]} ended with {code}:\n{log.read_text()[-3000:]}")
    after = os.times()
    reaped = after.children_user + after.children_system
    reaped -= before.children_user + before.children_system
    return Spent(wall, max(reaped, sum(seen.values())))


def _watched(
    process: "subprocess.Popen[bytes]", others: set[psutil.Process]
) -> tuple[int, CpuTimes]:
    """Returns the exit code and the CPU time last read of each process of the command."""
    seen: CpuTimes = {}
    while True:
        try:
            return process.wait(_SECONDS_BETWEEN_LOOKS), seen
        except subprocess.TimeoutExpired:
            for each in set(psutil.Process().children()) - others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    seen |= cpu_times(each)


def _wait_until(process: "subprocess.Popen[bytes]", until: Callable[[], bool], log: Path) -> float:
    while not until():
        if process.poll() is not None:
            raise SideError(f"it ended too early:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)
    return sum(cpu_times(psutil.Process(process.pid)).values())


def _end(process: "subprocess.Popen[bytes]", others: set[psutil.Process]) -> None:
    """Ends the command's processes, including those that this process has adopted."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
    left = [each for each in psutil.Process().children(recursive=True) if each not in others]
    _, alive = psutil.wait_procs(left, timeout=10)
    for each in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    for each in left:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(each.pid, 0)
