"""The process of an agent: what it reads, and that nothing of it remains."""

import asyncio
import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.agents.process import AgentHost, ProcessResult, row_of, variables_of
from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.environments.agent_programs import program_path
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.types import Prompt

KEY = "key-of-this-test"
PROMPT = Prompt("7", "2+2=", (1,), "4", "sums", '{"level": 3}')


def run(code: str, *, timeout_seconds: float = 20, row: str = "") -> ProcessResult:
    return asyncio.run(play(["python", "-c", code], timeout_seconds=timeout_seconds, row=row))


async def play(command: list[str], *, timeout_seconds: float = 20, row: str = "") -> ProcessResult:
    config = AgentEnvironment(command=command, episode_timeout_seconds=timeout_seconds)
    host = AgentHost(config)
    variables = {"PATH": program_path(), "OPENAI_API_KEY": KEY}
    try:
        return await host.play(command=command, row=row, variables=variables)
    finally:
        await host.stop()


def is_alive(process: int) -> bool:
    """Whether a process runs; a killed one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def processes_with(variable: str, *, named: str) -> list[str]:
    """Returns the command lines with that text of processes with that environment variable."""
    commands = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                commands.append((folder / "cmdline").read_bytes().decode())
    return [each for each in commands if named in each]


def test_an_agent_reads_its_row_and_its_output_is_kept() -> None:
    long = json.dumps({"prompt": "x" * 300_000})
    result = run("import sys; print(len(sys.stdin.read())); sys.exit(3)", row=long)
    assert result == ProcessResult(3, f"{len(long)}\n", "")
    assert run("import sys; sys.stderr.write('end')", row=long) == ProcessResult(0, "", "end")


def test_only_the_end_of_a_flood_is_kept() -> None:
    code = "import sys\nfor _ in range(3000): sys.stdout.write('x' * 1000)\nprint('end')"
    result = run(code)
    assert result.exit_code == 0
    assert result.output == "x" * (64 * 1024 - 4) + "end\n"


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
def test_children_end_with_their_agent(new_session: bool, hangs: bool) -> None:
    code = f"""
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session={new_session}, env={{}})
print(child.pid, flush=True)
time.sleep({1000 if hangs else 0})
"""
    start = time.monotonic()
    result = run(code, timeout_seconds=1.5 if hangs else 20)
    assert result.exit_code == (None if hangs else 0)
    assert time.monotonic() - start < 8
    assert not is_alive(int(result.output))


def test_a_cancelled_episode_ends_its_agent(tmp_path: Path) -> None:
    noted = tmp_path / "process"
    code = f"import os, time; open({str(noted)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"

    async def cancel() -> None:
        running = asyncio.create_task(play(["python", "-c", code]))
        while not noted.exists() or not noted.read_text():
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel())
    assert not is_alive(int(noted.read_text()))


def test_a_program_that_cannot_start_is_an_error() -> None:
    result = asyncio.run(play(["/no/such"]))
    assert result.exit_code == 1
    assert "FileNotFoundError" in result.errors


def test_an_agent_gets_its_session_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "SEARCH_KEY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("PATH", "/usr/bin")
    config = AgentEnvironment(command=["a"], variables=["SEARCH_KEY"])
    variables = variables_of(config, base_url="http://127.0.0.1:1/v1", api_key="key")
    assert variables["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert "OPENAI_API_KEY" not in variables_of(config)
    assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"] == "key"
    assert variables["SEARCH_KEY"] == "secret"
    assert variables["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert not variables.keys() & {"WANDB_API_KEY", "HTTPS_PROXY"}


def test_an_agent_reads_the_columns_of_its_row() -> None:
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    row = row_of(PROMPT)
    assert row == {
        **{"level": 3, "id": "7", "answer": "4", "task": "sums", "prompt": "2+2="},
        **{"messages": turns[1:], "tools": []},
    }
    tools = [{"type": "function", "function": {"name": "add"}}]
    conversation = Prompt("7", json.dumps(turns), (1,), "4", "sums", tools=json.dumps(tools))
    row = row_of(conversation)
    assert (row["messages"], row["tools"]) == (turns, tools)


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("async def run(base_url, api_key, row): return len(base_url) + row['n']", 4.0),
        ("def run(base_url, api_key, row): return {'reward': 0.5}", {"reward": 0.5}),
        ("import numpy\ndef run(*_): print('...', end=''); return numpy.float32(0.25)", 0.25),
        ("def run(*_): return None", None),
        ("import os\ndef run(*_): return 1.0 * ('NEMO_RL_REWARD_FILE' in os.environ)", 0.0),
    ],
)
def test_a_function_reports_what_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reward: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text(body)
    results, processes = play_function('{"n": 1}')
    assert [json.loads(each.reward) for each in results] == [reward] * 3
    assert not any(map(is_alive, processes))


def play_function(
    row: str, *, timeout_seconds: float = 20
) -> tuple[list[ProcessResult], list[int]]:
    """Plays three episodes of `my_agent:run`; returns also the host's number."""

    async def play() -> tuple[list[ProcessResult], list[int]]:
        config = AgentEnvironment(target="my_agent:run", episode_timeout_seconds=timeout_seconds)
        host = AgentHost(config)
        variables = {"OPENAI_BASE_URL": "abc", "OPENAI_API_KEY": KEY}
        try:
            episodes = (host.play(row=row, variables=variables) for _ in range(3))
            results = await asyncio.gather(*episodes)
            assert host._process is not None
            return results, [host._process.pid]
        finally:
            await host.stop()

    return asyncio.run(play())


def test_a_function_that_fails_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text("def run(*_): raise LookupError('no tool')")
    results, _ = play_function("{}")
    assert [each.exit_code for each in results] == [1, 1, 1]
    assert results[0].errors.endswith("LookupError: no tool\n")
    (tmp_path / "my_agent.py").write_text("import os\ndef run(*_): os.kill(os.getpid(), 9)")
    assert [each.exit_code for each in play_function("{}")[0]] == [-9, -9, -9]
    (tmp_path / "my_agent.py").write_text("import no_such_module")
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        play_function("{}")


@pytest.mark.parametrize(("number", "shown"), [(signal.SIGILL, "no AVX"), (signal.SIGKILL, "-9")])
def test_a_module_whose_import_ends_the_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "no AVX" if number == signal.SIGILL else ""
    code = f"import os\nprint({text!r}, end='', flush=True)\nos.kill(os.getpid(), {number:d})"
    (tmp_path / "my_agent.py").write_text(code)
    with pytest.raises(ConfigError, match=shown):
        play_function("{}")


def test_a_function_that_hangs_ends_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text(
        "import os, subprocess, time\n"
        "def run(*_):\n"
        "    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    print(os.getpid(), child.pid, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    results, _ = play_function("{}", timeout_seconds=2)
    assert [each.exit_code for each in results] == [None, None, None]
    processes = [int(each) for result in results for each in result.output.split()]
    assert len(processes) == 6
    assert not any(map(is_alive, processes))
