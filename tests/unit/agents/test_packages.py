"""The programs of docs/agents.md play environments of verifiers, OpenEnv and NeMo Gym.

`make test-agent-clients` installs each package into its own virtual environment in a folder, which
`AGENT_CLIENTS` names; otherwise the tests are skipped.
"""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.rollouts.engine import CompletionRequest
from nemo_rl_core.rollouts.episode import PlayedEpisode
from tests.documents import all_blocks
from tests.unit.agents.conftest import RecordedEngine
from tests.unit.agents.test_episode import one, play
from tests.unit.agents.test_killed_run import wait_until

FOLDER = Path(os.environ.get("AGENT_CLIENTS", "/none"))
TOOL = {
    **{"type": "function", "name": "increment_counter", "description": "", "strict": True},
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}},
}
COUNTS = {
    "responses_create_params": {"input": [{"role": "user", "content": "Add 3."}], "tools": [TOOL]},
    **{"initial_count": 3, "expected_count": 6},
}


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def python_of(package: str) -> Path:
    program = FOLDER / package / "bin" / "python"
    if not program.exists():
        pytest.skip("`make test-agent-clients` installs it")
    return program


def served(python: Path, program: str, servers: ExitStack) -> str:
    """Starts a server, and returns its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [python, Path(__file__).with_name(program), str(port)]
    server = servers.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
    servers.callback(server.kill)

    def answers() -> bool:
        assert server.poll() is None
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    wait_until(answers, seconds=120)
    return f"http://127.0.0.1:{port}"


def played(
    engine: RecordedEngine, python: Path, name: str, folder: Path, **options: Any
) -> PlayedEpisode:
    """Plays an episode with a program of the page."""
    (program,) = (each.text for each in all_blocks("text") if each.text.startswith(f"# {name}\n"))
    (folder / name).write_text(program)
    passed = [each for each in ("SSL_CERT_FILE", "OPENENV_URL", "GYM_URL") if each in os.environ]
    environment = {"command": [str(python), str(folder / name)], "variables": passed}
    return one(play(engine, environment, [("Hi", "answer")], **options))


def contents(sample: PlayedEpisode) -> list[str]:
    return [each["content"] for each in sample.turns.messages]


def test_a_task_of_verifiers_plays_the_policy(
    engine: RecordedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_of("verifiers")
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")  # with uv
    sample = played(engine, python, "play_verifiers.py", tmp_path)
    assert (sample.error, sample.reward) == (None, 1.0)  # its answer has the word "answer"
    assert contents(sample)[0] == "Hi"
    assert len(engine.requests) == 1


def test_an_environment_of_openenv_plays_the_policy(
    engine: RecordedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: ExitStack
) -> None:
    python = python_of("openenv")
    monkeypatch.setenv("OPENENV_URL", served(python, "openenv_server.py", servers))
    sample = played(engine, python, "play_openenv.py", tmp_path)
    assert (sample.error, sample.reward) == (None, 1.0)  # 0.5 for each turn
    assert contents(sample)[::2] == ["Hi", "Again?"]


def test_a_resources_server_of_nemo_gym_plays_the_policy(
    chat_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: ExitStack
) -> None:
    python = python_of("nemo-gym")
    monkeypatch.setenv("GYM_URL", served(python, "nemo_gym_server.py", servers))

    def text(request: CompletionRequest) -> str:
        call = {"name": "increment_counter", "arguments": {"count": 3}}
        first = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return "Done." if request.before else first

    engine = RecordedEngine(chat_tokenizer, text)
    row = json.dumps(COUNTS)
    sample = played(engine, python, "play_nemo_gym.py", tmp_path, metadata=row)
    assert (sample.error, sample.reward) == (None, 1.0)  # the server has counted from 3 to 6
    assert contents(sample) == ["Add 3.", "", '{"success":true}', "Done."]
