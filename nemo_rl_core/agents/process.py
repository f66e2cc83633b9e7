"""The process of an agent: what it gets, and how it and all of its children end."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.data.turns import as_turns
from nemo_rl_core.environments.agent_programs import program_path
from nemo_rl_core.types import Prompt

_FUNCTION_RUNNER = Path(__file__).with_name("function.py")
_PASSED_VARIABLES = (
    *("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PYTHONPATH", "SHELL", "TMPDIR"),
    *("TZ", "USER", "VIRTUAL_ENV"),
)
"""Variables of the run's environment that every agent gets, besides `PATH`."""
_MAX_OUTPUT_BYTES = 64 * 1024
_READ_SECONDS = 2.0
"""Time for the output of an agent that has ended; a child in another session may have it open."""


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """How the process of an agent ended.

    Attributes:
        exit_code: Exit code, or the negative signal; None at the time limit.
        output: End of its standard output.
        errors: End of its standard error.
    """

    exit_code: int | None
    output: str
    errors: str


def command_of(config: AgentEnvironment, row: Mapping[str, Any]) -> list[str]:
    """Returns the command of an episode."""
    if config.target is not None:
        return [sys.executable, "-P", str(_FUNCTION_RUNNER), config.target]
    return [each.replace("{prompt}", row["prompt"]) for each in config.command or ()]


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Returns the row that an agent reads: its columns, `prompt` as text and as `messages`."""
    turns = as_turns(prompt.text, role="user")
    return {
        **json.loads(prompt.metadata),
        "id": prompt.id,
        "prompt": turns[-1]["content"],
        "messages": turns,
        "answer": prompt.answer,
        "task": prompt.task,
    }


def variables_of(config: AgentEnvironment, base_url: str, api_key: str) -> dict[str, str]:
    """Returns the environment variables of an agent, without the run's others, such as secrets.

    Args:
        base_url: Address of the endpoint, without `/v1`.
    """
    names = [each for each in (*_PASSED_VARIABLES, *config.variables) if each in os.environ]
    return {
        **{name: os.environ[name] for name in names},
        "PATH": program_path(),
        "PYTHONHASHSEED": "0",  # an agent that iterates over a set does so in the same order
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": api_key,
    }


async def run_process(
    command: Sequence[str], *, row: str, variables: Mapping[str, str], timeout_seconds: float
) -> ProcessResult:
    """Runs the process of an agent, and kills it and its children at its end.

    Args:
        row: Standard input of the process.
        variables: Its environment variables, with a unique `OPENAI_API_KEY`.

    Raises:
        OSError: If the process cannot be started.
    """
    transport, ends = await asyncio.get_running_loop().subprocess_exec(
        _Process, *command, env=variables, start_new_session=True
    )
    row_pipe = transport.get_pipe_transport(0)
    assert isinstance(row_pipe, asyncio.WriteTransport)
    exit_code = None
    try:
        row_pipe.write(row.encode())  # not awaited: an agent need not read its row
        row_pipe.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(ends.has_exited.wait(), timeout_seconds)
            exit_code = transport.get_returncode()
    finally:
        end_processes(transport.get_pid(), variables["OPENAI_API_KEY"])
        with suppress(TimeoutError):
            await asyncio.wait_for(ends.has_closed.wait(), _READ_SECONDS)
        transport.close()
    return ProcessResult(exit_code, *(ends.tails[each].decode(errors="replace") for each in (1, 2)))


class _Process(asyncio.SubprocessProtocol):
    def __init__(self) -> None:
        self.has_exited, self.has_closed = asyncio.Event(), asyncio.Event()
        self.tails = {1: bytearray(), 2: bytearray()}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.tails[fd] += data
        del self.tails[fd][:-_MAX_OUTPUT_BYTES]

    def process_exited(self) -> None:
        self.has_exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_closed.set()


def end_processes(leader: int, key: str) -> None:
    """Kills the processes of a process group, and those in other groups with the session's key."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    while remaining := _processes_with(f"OPENAI_API_KEY={key}".encode()):
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
