"""Ends processes of agents that outlive their episode, or their run.

Started as `remains.py PROCESS VARIABLE`, it waits until a process ends, also by a kill, and then
ends the processes with that environment variable. It starts once per run.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

_MAX_KILLS = 100


def end_processes(variable: str) -> None:
    """Kills the processes that were started with an environment variable, `NAME=value`."""
    for _ in range(_MAX_KILLS):  # a killed process may have started another
        remaining = _processes_with(variable.encode())
        if not remaining:
            return
        for process in remaining:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _processes_with(variable: bytes) -> list[int]:
    processes = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended, or is another user's
            if folder.name.isdigit() and variable in (folder / "environ").read_bytes():
                processes.append(int(folder.name))
    return processes


def _wait_for_end(process: int) -> None:
    with suppress(ProcessLookupError):  # it has already ended
        select.select([os.pidfd_open(process)], [], [])


if __name__ == "__main__":
    _wait_for_end(int(sys.argv[1]))
    end_processes(sys.argv[2])
