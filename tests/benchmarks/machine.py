"""Speed of this machine, reported with the times of every test run.

`python tests/benchmarks/machine.py` prints its cores and the CPU-seconds of ten million additions
in a plain loop: 0.5 to 0.8 on a quick core, 3 on a slow or shared one. `python
tests/benchmarks/machine.py 1100 COMMAND` runs a command and fails if it takes more CPU time, with
its child processes, than 1,100 such loops. Workers of Rays that a test's program starts are not
counted: Ray does not wait for them.
"""

import ctypes
import os
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_BECOME_SUBREAPER = 36  # prctl(PR_SET_CHILD_SUBREAPER)
_SECONDS_TO_END = 20.0


def loop_seconds() -> float:
    """Returns the CPU-seconds of the loop, which uses globals like a script."""
    names: dict[str, int] = {"x": 0}
    started = time.process_time()
    exec("for i in range(10_000_000): x += i", names)
    return time.process_time() - started


def processor() -> str:
    """Returns the model of the processor; empty if Linux does not report it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def exit_code_of(command: list[str]) -> int:
    """Runs a command, and reaps orphans meanwhile: tests wait for such processes to vanish."""
    with subprocess.Popen(command) as process:
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode


def reap_orphans() -> None:
    """Waits for processes that have outlived their parents, so that their CPU time counts."""
    deadline = time.monotonic() + _SECONDS_TO_END
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.1)


def main(arguments: list[str]) -> int:
    """Prints the machine, or runs a command and bounds its CPU time.

    Args:
        arguments: Empty, or the largest CPU time in loops, followed by a command.

    Returns:
        The exit code of the command, or 1 if it succeeded but took too long.
    """
    exit_code, loop, cpu_time = 0, loop_seconds(), ""
    if arguments:
        ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)
        exit_code = exit_code_of(arguments[1:])
        reap_orphans()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        loop = min(loop, loop_seconds())  # other processes may have slowed one of them
        seconds = used.ru_utime + used.ru_stime
        cpu_time = f"; {seconds:,.0f} CPU-s, at most {float(arguments[0]) * loop:,.0f} here"
        exit_code = exit_code or int(seconds > float(arguments[0]) * loop)
    load = os.getloadavg()[0]
    print(  # noqa: T201
        f"machine: {len(os.sched_getaffinity(0))} cores ({processor()}), load {load:.1f}; "
        f"10 M additions in {loop:.2f} CPU-s{cpu_time}"
    )
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
