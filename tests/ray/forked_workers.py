"""Ray workers that are forked from one process with all imports.

Tests start about a hundred workers, and each would import torch and vLLM for ten CPU-seconds. Ray
calls `python forked_workers.py SOCKET ARGUMENTS` as the interpreter (`py_executable`), and a server
that listens on that socket forks the worker. Commands and scripts start their workers as users do.
"""

import gc
import importlib
import json
import os
import runpy
import socket
import sys
from contextlib import suppress
from pathlib import Path

IMPORTED = [
    "nemo_rl_core.backends.generation.hugging_face",
    "nemo_rl_core.backends.generation.vllm",
    "nemo_rl_core.backends.training.dtensor.backend",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.qwen2.modeling_qwen2",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
]


def serve(address: str) -> None:
    """Imports everything, then forks a worker for every connection until the parent ends."""
    parent = os.getppid()
    sys.modules["ray"] = None  # type: ignore[assignment]  (it reads its environment only once)
    for module in IMPORTED:
        importlib.import_module(module)
    del sys.modules["ray"]
    gc.freeze()  # else the collector of each worker would copy all of this memory
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(1)
        listener.bind(address)
        listener.listen()
        while os.getppid() == parent:
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                if os.fork() == 0:
                    listener.close()
                    _work(connection)
                    return
                connection.close()


def _work(connection: socket.socket) -> None:
    """Becomes the process that asked; the connection is open until this process ends."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv, environment, here = json.load(connection.makefile())
    if environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):  # it has other packages
        connection.set_inheritable(True)
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(here)
    runpy.run_path(sys.argv[0], run_name="__main__")


def ask(address: str, arguments: list[str]) -> None:
    """Has the server fork a process for these arguments, and waits for its end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"0"], [0, 1, 2])
        connection.sendall(json.dumps([arguments, dict(os.environ), str(Path.cwd())]).encode())
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        ask(sys.argv[1], sys.argv[2:])
