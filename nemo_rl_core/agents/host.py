"""Process that starts agents: `host.py [module:function]`.

Its standard input is a socket, over which the run sends one socket per episode. For each, the host
forks a guard, and the guard forks the agent: a function of a module that the host has imported, or
a program. A fork takes milliseconds; imports often take a second. Orphans of an agent become
children of its guard, which kills them when the agent ends. If the run is killed, its sockets
close, which ends agents and host.
"""

import asyncio
import ctypes
import gc
import importlib
import inspect
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

REWARD_FILE = "NEMO_RL_REWARD_FILE"
"""Variable that names the file for the reward; text that an agent prints may be the policy's."""
_MAX_OUTPUT_BYTES = 64 * 1024
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NO_SERVER = "http://127.0.0.1:1"


def serve(run: Callable[..., Any] | None) -> None:
    """Plays episodes until the socket of the run is closed.

    Args:
        run: Function of the agent; None if episodes name a command.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets guards that have ended
    gc.freeze()  # a collection in a fork would copy the memory of all objects
    with TemporaryDirectory(prefix="nemo-rl-agent-") as folder, socket.socket(fileno=0) as episodes:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for number in count():
            _, received, _, _ = socket.recv_fds(episodes, 1, 1)
            if not received:
                break
            with socket.socket(fileno=received[0]) as episode:
                if os.fork() == 0:
                    episodes.close()
                    _end_after(partial(_answer, episode, run, Path(folder, f"{number:d}.json")))


def _end_after(play: Callable[[], object]) -> None:
    """Ends this process after a call; what it raises is printed."""
    code = 1
    try:
        play()
        code = 0
    # Broad on purpose: a fork must not return to the host's code.
    except BaseException:  # noqa: BLE001 (shown in the error of the run or episode)
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _answer(episode: socket.socket, run: Callable[..., Any] | None, reward_file: Path) -> None:
    """Sends the `ProcessResult` of an episode; an error of its guard is one of the episode."""
    try:
        result = _guard(episode, run, reward_file)
    # Broad on purpose: the run would wait for a guard that says nothing.
    except Exception:  # noqa: BLE001 (shown in the error of the episode)
        result = [1, "", traceback.format_exc(), ""]
    with suppress(OSError):  # the run has gone
        episode.sendall(json.dumps(result).encode())


def _guard(
    episode: socket.socket, run: Callable[..., Any] | None, reward_file: Path
) -> list[int | str | None]:
    """Plays an episode and kills its processes; returns the fields of its `ProcessResult`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with episode.makefile() as lines:
        line = lines.readline()
    if not line:  # it was cancelled
        return []
    request = json.loads(line)
    outputs = [os.pipe(), os.pipe()]
    guard, agent = os.getpid(), os.fork()
    if agent == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a guard that is killed ends it
        if os.getppid() != guard:
            os._exit(1)
        episode.close()
        _end_after(partial(_play, request, run, reward_file, [end for _, end in outputs]))
    for _, end in outputs:
        os.close(end)
    tails = {start: bytearray() for start, _ in outputs}
    exited = os.pidfd_open(agent)
    has_exited = _read_until(exited, episode, tails, request["timeout_seconds"])
    code = _end_processes(agent)
    _read_rest(tails)
    reward = ""
    if reward_file.is_file():  # not a pipe, which might block
        with reward_file.open(errors="replace") as file:
            reward = file.read(_MAX_OUTPUT_BYTES)
        reward_file.unlink()
    output, errors = (each.decode(errors="replace") for each in tails.values())
    return [code if has_exited else None, output, errors, reward]


def _play(
    request: Mapping[str, Any],
    run: Callable[..., Any] | None,
    reward_file: Path,
    outputs: list[int],
) -> None:
    """Becomes the agent, in its fork."""
    os.setsid()
    file = os.memfd_create("row")
    os.write(file, request["row"].encode())
    os.lseek(file, 0, os.SEEK_SET)
    for number, stream in enumerate([file, *outputs]):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["variables"])
    if run is None:
        os.environ[REWARD_FILE] = str(reward_file)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
        os.execvp(request["command"][0], request["command"])
    # Programs that the agent starts do not get the file.
    session = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    result = run(*session, json.loads(request["row"]))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    reward_file.write_text(json.dumps(result, default=float))


def _read_until(
    exited: int, episode: socket.socket, tails: dict[int, bytearray], timeout_seconds: float
) -> bool:
    """Reads outputs until the agent exits, and returns whether it has: not at the time limit."""
    deadline = time.monotonic() + timeout_seconds
    outputs = set(tails)
    while True:
        seconds_left = max(0.0, deadline - time.monotonic())
        ready = select.select([exited, episode.fileno(), *outputs], [], [], seconds_left)[0]
        if not ready or exited in ready or episode.fileno() in ready:
            return exited in ready
        outputs -= {each for each in ready if not _read(each, tails[each])}


def _read_rest(tails: dict[int, bytearray]) -> None:
    """Reads the rest of the outputs, which other processes may keep open."""
    for output, tail in tails.items():
        os.set_blocking(output, False)
        with suppress(BlockingIOError):
            while _read(output, tail):
                pass


def _read(output: int, tail: bytearray) -> bool:
    data = os.read(output, _MAX_OUTPUT_BYTES)
    tail += data
    del tail[:-_MAX_OUTPUT_BYTES]
    return bool(data)


def _end_processes(agent: int) -> int:
    """Kills the agent with all its descendants, and returns its exit code or negative signal."""
    # Until it is waited for, its number and that of its group belong to it.
    with suppress(ProcessLookupError):  # before its `setsid`
        os.killpg(agent, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    # None is left, or only those of another user.
    with suppress(ChildProcessError, PermissionError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
    return code


def _children() -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
    return [child for child, parent in parents.items() if parent == os.getpid()]


def _function(target: str) -> Callable[..., Any]:
    """Imports the function, and what the first call of a client would import."""
    module, _, name = target.partition(":")
    sys.path.append(str(Path.cwd()))  # last, as for rewards and environments of a recipe
    run: Callable[..., Any] = getattr(importlib.import_module(module), name)
    asyncio.run(_warm_clients())
    return run


async def _warm_clients() -> None:
    """Calls no server with the imported clients: in each fork, a first call takes 80 ms more."""
    messages: Any = [{"role": "user", "content": ""}]
    if "openai" in sys.modules:
        import openai

        async with openai.AsyncOpenAI(base_url=_NO_SERVER, api_key="-", max_retries=0) as client:
            with suppress(openai.APIConnectionError):
                await client.chat.completions.create(model="policy", messages=messages)
    if "anthropic" in sys.modules:
        import anthropic

        async with anthropic.AsyncAnthropic(
            base_url=_NO_SERVER, api_key="-", max_retries=0
        ) as anthropic_client:
            with suppress(anthropic.APIConnectionError):
                await anthropic_client.messages.create(
                    model="policy", messages=messages, max_tokens=1
                )


if __name__ == "__main__":
    _end_after(lambda: serve(_function(sys.argv[1]) if sys.argv[1:] else None))
