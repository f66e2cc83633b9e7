"""`nemo-rl serve`: a real vLLM server, called over HTTP and stopped by a signal."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nemo_rl_core.evals.chat import Chat
from workflows.cli import group

REPOSITORY = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def request(port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        response: dict[str, Any] = json.load(answer)
    return response


def processes_of(group_id: int) -> list[str]:
    """Returns the command lines of a process group, without dead processes."""
    commands = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group_id and fields[0] != "Z":
            commands.append(stat.parent.name)
    return commands


@pytest.mark.slow
def test_the_server_answers_like_the_chat_and_ends_at_a_signal(
    tiny_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    log = (tmp_path / "log").open("w+")
    script = [str(Path(sys.prefix) / "bin" / "nemo-rl")]
    server = subprocess.Popen(
        [*script, "serve", str(tiny_model), "--port", str(port), "--name", "small",
         "--max-model-len", "64"],
        cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
    )  # fmt: skip
    try:
        while True:
            try:
                models = request(port, "/v1/models")
                break
            except OSError:
                assert server.poll() is None, Path(log.name).read_text()[-3000:]
                time.sleep(0.5)
        (listed,) = models["data"]
        assert (listed["id"], listed["max_model_len"]) == ("small", 64)  # an option of vLLM's
        prompts = ["12+34=", "7+5="]
        chat = Chat(tiny_model, max_new_tokens=6)
        greedy = {"model": "small", "temperature": 0, "max_tokens": 6}
        for prompt in prompts:
            turn = {"role": "user", "content": prompt}
            answer = request(port, "/v1/chat/completions", {**greedy, "messages": [turn]})
            assert answer["choices"][0]["message"]["content"] == chat.answer(prompt)
            answer = request(port, "/v1/completions", {**greedy, "prompt": prompt})
            assert answer["choices"][0]["text"] == chat.answer(prompt)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=120) == 0
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    # vLLM's helpers see the end of the server's pipe shortly after it.
    deadline = time.monotonic() + 20
    while processes_of(server.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(server.pid) == []
    assert "Traceback" not in Path(log.name).read_text()


def test_invalid_models_and_ports_are_refused_before_the_engine_starts(
    tiny_model: Path, tmp_path: Path, own_store: Path
) -> None:
    result = CliRunner().invoke(group, ["serve", "nowhere"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no model 'nowhere'" in result.stderr
    result = CliRunner().invoke(group, ["serve", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "has no config.json" in result.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(group, ["serve", str(tiny_model), "--port", port])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"cannot be served on 127.0.0.1, port {port}" in result.stderr
