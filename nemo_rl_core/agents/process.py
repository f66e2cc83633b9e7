"""The host of agents as the run sees it, and what an agent gets."""

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.data.turns import as_turns
from nemo_rl_core.environments.agent_programs import program_path
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.types import Prompt

_HOST = Path(__file__).with_name("host.py")
_PASSED_VARIABLES = (
    *("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PYTHONPATH", "SHELL", "TMPDIR"),
    *("TZ", "USER", "VIRTUAL_ENV"),
)
"""Variables of the run's environment that every agent gets, besides `PATH`."""
_END_SECONDS = 5.0
"""Time for the processes of a cancelled episode to end."""


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


class AgentHost:
    """Process that plays the episodes of a run's agents; see `host.py`."""

    def __init__(self, config: AgentEnvironment) -> None:
        self._config = config
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._episodes: socket.socket | None = None
        self._failure: ConfigError | None = None
        self._was_killed = False

    async def play(
        self, *, command: Sequence[str] = (), row: str, variables: Mapping[str, str]
    ) -> ProcessResult:
        """Plays an episode; all of its processes have ended when this returns, or is cancelled.

        Args:
            command: Program and arguments, unless the agent is a function.
            row: JSON of the row.
            variables: Environment variables of the agent.

        Raises:
            ConfigError: If the module of the function cannot be imported.
        """
        request = {
            "command": [*command],
            "row": row,
            "variables": dict(variables),
            "timeout_seconds": self._config.episode_timeout_seconds,
        }
        episode, guard_end = socket.socketpair()
        with guard_end:
            await self._send(guard_end)
        reader, writer = await asyncio.open_unix_connection(sock=episode)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            limit = self._config.episode_timeout_seconds + _END_SECONDS
            result = await asyncio.wait_for(reader.read(), limit)
        except TimeoutError:  # the guard hangs, too
            return ProcessResult(None, "", "")
        except (BrokenPipeError, ConnectionResetError):  # the host was killed
            result = b""
        finally:
            with suppress(TimeoutError, OSError):
                writer.write_eof()  # the guard ends the episode, and then closes its end
                await asyncio.wait_for(reader.read(), _END_SECONDS)
            writer.close()
        return ProcessResult(*json.loads(result)) if result else _KILLED

    async def _send(self, guard_end: socket.socket) -> None:
        """Sends the socket of an episode to the host, which is started if there is none."""
        async with self._starting:
            if self._failure is not None:
                raise self._failure
            if self._process is None or self._process.returncode is not None:
                await self.stop()
                await self._start()
            assert self._episodes is not None
            while True:
                try:
                    socket.send_fds(self._episodes, [b"e"], [guard_end.fileno()])
                    return
                except BlockingIOError:  # the host has many others to fork
                    await asyncio.sleep(0.01)
                except (
                    BrokenPipeError,
                    ConnectionResetError,
                ):  # killed: the episode gets no answer
                    return

    async def _start(self) -> None:
        target = self._config.target
        self._episodes, host_end = socket.socketpair()
        self._episodes.setblocking(False)
        with host_end:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *(["-I", "-S"] if target is None else ["-P"]), str(_HOST)),
                *([] if target is None else [target]),
                stdin=host_end.fileno(),
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
                code = await self._process.wait()
                if code in _KILLS and not self._was_killed:  # the next episode starts another
                    self._was_killed = True
                    return
                self._failure = ConfigError(
                    f"environment.target: {target!r} cannot be imported in its process",
                    got=b"".join(lines[-4:]).decode(errors="replace").strip()
                    or f"exit code {code}",
                    fix="correct the module; it gets only the variables in environment.variables",
                )
                raise self._failure

    async def stop(self) -> None:
        """Ends the process, which has no episodes."""
        if self._process is None or self._episodes is None:
            return
        self._episodes.close()
        try:
            await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        except TimeoutError:  # the module of the function hangs
            self._process.kill()
            await self._process.wait()


_KILLS = (-signal.SIGKILL, -signal.SIGTERM)
_KILLED = ProcessResult(1, "", "the process that plays the agent was killed")
