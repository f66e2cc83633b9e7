"""Runs a function on several ranks of this machine without Ray, for commands and notebooks."""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import cloudpickle

from nemo_rl_core.checkpoints.model_code import worker_environment
from nemo_rl_core.distributed.ports import LOOPBACK, hold_port
from nemo_rl_core.distributed.process_group import rank_environment
from nemo_rl_core.errors import WorkerError


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    num_threads: int = 1,
    timeout_seconds: float = 6 * 3600.0,
) -> list[Any]:
    """Calls `function(*args)` in `world_size` processes that can join one process group.

    Each process has the environment of this one, and the variables that `join_process_group` reads.

    Args:
        function: Function to call; it is sent by value and may be a closure.
        timeout_seconds: Time limit for all ranks together, which ends deadlocked ranks. A
            conversion of a large model takes hours.

    Raises:
        WorkerError: If a rank raises, dies, or does not end in time; the others are ended.
    """
    # Forked from a server that has imported torch once: a rank then starts in a fraction of a
    # second, and no thread of this process is copied into it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    call = cloudpickle.dumps((function, args))
    port = hold_port([0], host=LOOPBACK)
    assert port is not None
    readers: list[Connection] = []
    processes = []
    for rank in range(world_size):
        reader, writer = context.Pipe(duplex=False)
        environment = dict(os.environ)  # the server has that of the first call
        environment |= rank_environment(rank, world_size, address=LOOPBACK, port=port)
        environment |= {"OMP_NUM_THREADS": str(num_threads), **worker_environment()}
        process = context.Process(target=_rank, args=(call, environment, num_threads, writer))
        with _without_main_module():
            process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    try:
        return _collect(readers, timeout_seconds)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keeps a rank from running the user's script again; what it needs of it is in the call."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _rank(call: bytes, environment: dict[str, str], num_threads: int, writer: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(num_threads)
    answer: tuple[bool, Any]
    try:
        function, args = cloudpickle.loads(call)
        answer = True, function(*args)
    except BaseException:  # noqa: BLE001  (the parent raises it again)
        answer = False, traceback.format_exc()
    # Sent before the group is left: leaving waits for ranks that may have failed.
    writer.send_bytes(cloudpickle.dumps(answer))
    writer.close()
    if answer[0] and dist.is_initialized():
        dist.destroy_process_group()


def _collect(readers: list[Connection], timeout_seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(zip(readers, range(len(readers)), strict=True))
    deadline = time.monotonic() + timeout_seconds
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerError(
                f"ranks {sorted(waiting.values())} did not end within {timeout_seconds:.0f} s",
                fix="a rank that skips a collective leaves the others waiting: check the ranks "
                "that did end",
            )
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = waiting.pop(reader)
            try:
                succeeded, value = cloudpickle.loads(reader.recv_bytes())
            except EOFError as error:
                raise WorkerError(f"rank {rank} died without an answer") from error
            if not succeeded:
                raise WorkerError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]
