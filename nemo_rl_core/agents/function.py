"""Host of an agent that is a Python function: it imports the module once, and forks per episode.

Started as `function.py module:function SOCKET`; each episode is a `fork.py SOCKET`. A fork takes
milliseconds, and the imports of an agent often a second.
"""

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_MAX_VARIABLES_BYTES = 256 * 1024
_SET_PDEATHSIG = 1


def serve(target: str, path: str) -> None:
    """Imports the function, and runs episodes until the standard input is closed."""
    module, _, name = target.partition(":")
    sys.path.append(str(Path.cwd()))  # last, as for rewards and environments of a recipe
    run = getattr(importlib.import_module(module), name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets forks that have ended
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1024)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            episode, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _guard(episode, run)
                os._exit(0)
            episode.close()


def _guard(episode: socket.socket, run: Callable[..., Any]) -> None:
    """Forks the agent, and kills it and its process group when it or its episode ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    variables, streams, _, _ = socket.recv_fds(episode, _MAX_VARIABLES_BYTES, 3)
    guard, agent = os.getpid(), os.fork()
    if agent == 0:
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)  # a guard that is killed ends it
        if os.getppid() != guard:
            os._exit(1)
        os.setsid()
        episode.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.environb.clear()
        for name, _, value in (each.partition(b"=") for each in variables.split(b"\0")):
            os.environb[name] = value
        os._exit(_call(run))
    for stream in streams:
        os.close(stream)
    select.select([os.pidfd_open(agent), episode.fileno()], [], [])
    # Until it is waited for, its number and that of its group belong to it.
    with suppress(ProcessLookupError):  # before its `setsid`
        os.killpg(agent, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    with suppress(OSError):
        episode.send(str(code).encode())


def _call(run: Callable[..., Any]) -> int:
    try:
        # Programs that the agent starts do not get it.
        file = Path(os.environ.pop("NEMO_RL_REWARD_FILE"))
        row = json.load(sys.stdin)
        result = run(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        file.write_text(json.dumps(result, default=float))
    # Broad on purpose: the fork must not return to the host's code.
    except BaseException:  # noqa: BLE001 (shown in the error of the episode)
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    serve(*sys.argv[1:])
