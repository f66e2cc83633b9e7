"""A run that is killed leaves no process of its agents and no port."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.conftest import RecordedEngine
from tests.unit.agents.test_episode import play, python
from tests.unit.agents.test_process import is_alive

NOTE = """
import os, subprocess, time
def note(folder, *processes):
    text = os.environ["OPENAI_BASE_URL"] + " " + " ".join(map(str, processes))
    open(f"{folder}/{os.getpid()}.new", "w").write(text)
    os.rename(f"{folder}/{os.getpid()}.new", f"{folder}/{os.getpid()}.txt")
    time.sleep(1000)
"""
CHILD = "subprocess.Popen(['sleep', '1000'], start_new_session=True).pid"


def killed_run(engine: RecordedEngine, environment: dict[str, Any], notes: Path) -> list[str]:
    """Plays three episodes in a fork, kills it, and returns what its agents noted."""
    run = os.fork()
    if run == 0:
        play(engine, environment, [(text, "") for text in "abc"])
        os._exit(0)
    try:
        wait_until(lambda: len([*notes.glob("*.txt")]) == 3)
    finally:
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
    return [each.read_text() for each in notes.glob("*.txt")]


def wait_until(is_so: Callable[[], bool], *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("is_function", [False, True])
def test_a_killed_run_leaves_no_process(
    engine: RecordedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_function: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    body = f"note({str(tmp_path)!r}, os.getpid(), os.getppid(), {CHILD})"
    environment: dict[str, Any] = {"target": "noting_agent:run"}
    if is_function:
        (tmp_path / "noting_agent.py").write_text(f"{NOTE}def run(*_):\n    {body}\n")
    else:
        environment = python(f"{NOTE}{body}")
    notes = killed_run(engine, environment, tmp_path)
    processes = [int(each) for note in notes for each in note.split()[1:]]
    assert len(processes) == 9  # each agent, its parent and its child
    wait_until(lambda: not any(map(is_alive, processes)))
    address = notes[0].split()[0].removesuffix("/v1").rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(address[2])), timeout=5)
