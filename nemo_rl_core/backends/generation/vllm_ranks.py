"""Rendezvous of the ranks of one vLLM engine."""

import os
import time
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.distributed.process_group import rank, rank_environment, world_size
from nemo_rl_core.distributed.virtual_cluster import free_address

_POLL_SECONDS = 0.05
_SHARED_MEMORY = Path("/dev/shm")


def launcher() -> Any:
    """Returns the executor class for ranks that vLLM did not start."""
    if torch.cuda.is_available():
        return "external_launcher"
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class NamedLauncher(ExecutorWithExternalLauncher):  # type: ignore[misc]
        """An external launcher with a separate rendezvous address per engine.

        On a CPU, ranks communicate through shared memory, which vLLM names after the port of the
        rendezvous address. `env://` has no port: all engines of a machine would use the same name,
        and remains of a killed engine would block all later ones.
        """

        def _distributed_args(self) -> tuple[str, int, int]:
            _, rank, local_rank = super()._distributed_args()
            address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return address, rank, local_rank

    return NamedLauncher


def unlink_shared_memory() -> None:
    """Unlinks the shared memory of a running engine after all its ranks have mapped it.

    The memory is then freed however the processes end.
    """
    from vllm.distributed import get_tp_group

    for path in _SHARED_MEMORY.glob(f"{os.environ['MASTER_PORT']}-*-cpushm_*"):
        path.unlink(missing_ok=True)
    # Only ranks of one machine have shared memory.
    ring: Any = getattr(get_tp_group().mq_broadcaster, "buffer", None)
    if ring is not None and ring.is_creator:
        ring.shared_memory.unlink()
        ring.is_creator = False  # the creator would unlink it again at exit


def join_engine(num_ranks: int) -> None:
    """Sets the environment variables of this rank from all workers to its engine's ranks.

    All workers know the address of the first worker. Its store holds the address of each engine's
    first rank.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    num_workers, global_rank = world_size(), rank()
    engine, rank_in_engine = divmod(global_rank, num_ranks)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if num_workers > num_ranks:
        self_hosted = global_rank == 0
        store = TCPStore(address, port, num_workers, is_master=self_hosted)
        if rank_in_engine == 0:
            own = free_address()
            store.set(f"engine {engine}", f"{own[0]} {own[1]}")
        words = store.get(f"engine {engine}").decode().split()
        address, port = words[0], int(words[1])
        # The store ends with its host, which therefore waits until all ranks have read.
        store.add("read", 1)
        while self_hosted and store.add("read", 0) < num_workers:
            time.sleep(_POLL_SECONDS)
    # Ray makes only the worker's GPU visible, as device 0.
    local_rank = 0 if torch.cuda.is_available() else rank_in_engine
    os.environ.update(
        rank_environment(
            rank_in_engine, num_ranks, address=address, port=port, local_rank=local_rank
        )
    )
