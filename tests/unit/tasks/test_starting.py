"""The line that a command shows while it imports its libraries."""

import io
import subprocess
import sys
import time

import pytest

from tasks.local_run import starting
from tasks.local_run.starting import StartingLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_time_and_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_FRAME_SECONDS", 0.001)
    stream = Terminal()
    line = StartingLine(stream)
    while stream.getvalue().count("importing libraries  0:00") < 2:
        time.sleep(0.001)
    line.end()
    line.end()
    # Other output begins at the left.
    assert set(stream.getvalue().removesuffix("\r\x1b[K").split("\r")) == {
        "",
        "importing libraries  0:00",
    }


@pytest.mark.parametrize(("after", "shown"), [(0.0, "importing libraries ...\n"), (60.0, "")])
def test_a_pipe_gets_one_line_if_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, after: float, shown: str
) -> None:
    monkeypatch.setattr(starting, "_LINE_SECONDS", after)
    stream = io.StringIO()
    frames = iter(range(3))
    StartingLine(stream, is_over=lambda: next(frames, None) is None)._thread.join()
    assert stream.getvalue() == shown


def test_ctrl_c_before_a_run_prints_no_traceback() -> None:
    script = """
import signal
from tasks.local_run import starting
starting.begin_line()
signal.raise_signal(signal.SIGINT)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "stopped from outside before the run began: nothing was started\n"
