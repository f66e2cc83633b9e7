"""The process of an agent: what it gets, and how it and all of its children end."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemo_rl_core.agents.remains import end_processes
from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.data.turns import as_turns
from nemo_rl_core.environments.agent_programs import program_path
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.types import Prompt

_HOST = Path(__file__).with_name("function.py")
_FORK = Path(__file__).with_name("fork.py")
_REMAINS = Path(__file__).with_name("remains.py")
_PASSED_VARIABLES = (
    *("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PYTHONPATH", "SHELL", "TMPDIR"),
    *("TZ", "USER", "VIRTUAL_ENV"),
)
"""Variables of the run's environment that every agent gets, besides `PATH`."""
REWARD_FILE = "NEMO_RL_REWARD_FILE"
"""Variable that names the file for the reward; text that an agent prints may be the policy's."""
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
        reward: Content of the file for the reward; empty without one.
    """

    exit_code: int | None
    output: str
    errors: str
    reward: str = ""


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Returns the columns of the row that an agent reads; `messages` is the prompt as turns."""
    turns = as_turns(prompt.text, role="user")
    return {
        **json.loads(prompt.metadata),
        "id": prompt.id,
        "prompt": turns[-1]["content"],
        "messages": turns,
        "answer": prompt.answer,
        "task": prompt.task,
        "tools": json.loads(prompt.tools),
    }


def variables_of(config: AgentEnvironment, **session: str) -> dict[str, str]:
    """Returns the environment variables of an agent, without the run's others, such as secrets.

    Args:
        session: Address and key of its session, as `base_url` and `api_key`.
    """
    names = [each for each in (*_PASSED_VARIABLES, *config.variables) if each in os.environ]
    return {
        **{name: os.environ[name] for name in names},
        "PATH": program_path(),
        "PYTHONHASHSEED": "0",  # an agent that iterates over a set does so in the same order
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        **{
            f"{provider}_{name.upper()}": value
            for name, value in session.items()
            for provider in ("OPENAI", "ANTHROPIC")
        },
    }


class FunctionHost:
    """Process that imports an agent's function once, and forks for each episode."""

    def __init__(self, config: AgentEnvironment) -> None:
        self._config = config
        self._starting = asyncio.Lock()
        self._folder: TemporaryDirectory[str] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._failure: ConfigError | None = None

    async def command(self) -> list[str]:
        """Returns the command of an episode, whose host is started if there is none.

        Raises:
            ConfigError: If the module cannot be imported.
        """
        async with self._starting:
            if self._failure is not None:
                raise self._failure
            if self._process is None or self._process.returncode is not None:
                await self.stop()
                self._folder = TemporaryDirectory(prefix="nemo-rl-agent-")
                await self._start(f"{self._folder.name}/socket")
        assert self._folder is not None
        return [sys.executable, "-I", "-S", str(_FORK), f"{self._folder.name}/socket"]

    async def _start(self, path: str) -> None:
        target = self._config.target
        assert target is not None
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(_HOST), target, path),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            env=variables_of(self._config),
            start_new_session=True,
        )
        assert self._process.stdout is not None  # it is a pipe
        lines = [b""]
        while lines[-1] != b"ready\n":
            lines.append(await self._process.stdout.readline())
            if not lines[-1]:
                self._failure = ConfigError(
                    f"environment.target: {target!r} cannot be imported in its process",
                    got=b"".join(lines[-4:]).decode(errors="replace").strip(),
                    fix="correct the module; it gets only the variables in environment.variables",
                )
                raise self._failure

    async def stop(self) -> None:
        """Ends the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            if self._process.returncode is None:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            await self._process.stdin.wait_closed()
        if self._folder is not None:
            self._folder.cleanup()


async def watch_run(base_url: str) -> asyncio.subprocess.Process:
    """Starts a process that ends the agents of this address if this process is killed."""
    command = (sys.executable, "-I", "-S", str(_REMAINS), str(os.getpid()))
    variable = f"OPENAI_BASE_URL={base_url}"
    return await asyncio.create_subprocess_exec(*command, variable, start_new_session=True)


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
    with TemporaryDirectory(prefix="nemo-rl-agent-", ignore_cleanup_errors=True) as folder:
        reward = Path(folder, "reward.json")
        variables = {**variables, REWARD_FILE: str(reward)}
        result = await _run_process(command, row, variables, timeout_seconds)
        if reward.is_file():  # not a pipe, which might block
            with reward.open(errors="replace") as file:
                return replace(result, reward=file.read(_MAX_OUTPUT_BYTES))
    return result


async def _run_process(
    command: Sequence[str], row: str, variables: Mapping[str, str], timeout_seconds: float
) -> ProcessResult:
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
        with suppress(ProcessLookupError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        end_processes(f"OPENAI_API_KEY={variables['OPENAI_API_KEY']}")
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
