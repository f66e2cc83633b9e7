"""`nemo-rl ui` as a user starts it."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest


def start(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", "from workflows.cli import main; main()", "ui", *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("by_option", [True, False])
def test_the_page_is_served_at_the_printed_address(made, by_option: bool) -> None:
    root = str(made.store.root)
    process = (
        start("--port", "0", "--store", root)
        if by_option
        else start("--port", "0", NEMO_RL_HOME=root)
    )
    try:
        line = process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert match, line
        assert root in line
        answer = urllib.request.urlopen(match[0], timeout=500).read().decode()
        assert "20260101T000000Z-aaaaaa" in answer
    finally:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=500)
    assert stderr == ""


def test_a_port_in_use_is_explained(made) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start("--port", str(taken.getsockname()[1]), NEMO_RL_HOME=str(made.store.root))
        _, stderr = process.communicate(timeout=500)
    assert process.returncode == 2
    assert "cannot be served" in stderr
    assert "--port 0" in stderr
    assert "Traceback" not in stderr


def test_a_publicly_reachable_address_is_a_warning(made) -> None:
    process = start("--host", "0.0.0.0", "--port", "0", NEMO_RL_HOME=str(made.store.root))
    try:
        assert "there is no login" in process.stderr.readline()
    finally:
        process.terminate()
        process.communicate(timeout=500)
