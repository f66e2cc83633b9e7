"""How the ranks of one vLLM engine find one another."""

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
    """The executor of a rank that something else than vLLM has started."""
    if torch.cuda.is_available():
        return "external_launcher"
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class NamedLauncher(ExecutorWithExternalLauncher):  # type: ignore[misc]
        """Meets at an address of its own.

        On a CPU, ranks talk through shared memory, which vLLM names by the port of the address
        where they meet. `env://` has none: all engines of a machine would take the same name, and
        what one that was killed has left behind would be in the way of all later ones.
        """

        def _distributed_args(self) -> tuple[str, int, int]:
            _, rank, local_rank = super()._distributed_args()
            address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return address, rank, local_rank

    return NamedLauncher


def forget_names() -> None:
    """Takes the names off the shared memory of a running engine, which all its ranks have mapped.

    So nothing is left behind, however its processes end.
    """
    from vllm.distributed import get_tp_group

    for path in _SHARED_MEMORY.glob(f"{os.environ['MASTER_PORT']}-*-cpushm_*"):
        path.unlink(missing_ok=True)
    # Ranks of one machine share it; between machines there is none.
    ring: Any = getattr(get_tp_group().mq_broadcaster, "buffer", None)
    if ring is not None and ring.is_creator:
        ring.shared_memory.unlink()
        ring.is_creator = False  # who would take the name off once more at its own end


def meet(num_ranks: int) -> None:
    """Narrows the environment from all workers to those of this rank's engine.

    All workers know where the first of them is. There, the first of each engine leaves word of
    where the others find it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    everybody, place = world_size(), rank()
    engine, place_in_engine = divmod(place, num_ranks)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if everybody > num_ranks:
        self_hosted = place == 0
        store = TCPStore(address, port, everybody, is_master=self_hosted)
        if place_in_engine == 0:
            own = free_address()
            store.set(f"engine {engine}", f"{own[0]} {own[1]}")
        words = store.get(f"engine {engine}").decode().split()
        address, port = words[0], int(words[1])
        # The store goes when its host leaves, which must not be before all have read.
        store.add("read", 1)
        while self_hosted and store.add("read", 0) < everybody:
            time.sleep(_POLL_SECONDS)
    # Ray shows a worker its own GPU alone, as device 0.
    local_rank = 0 if torch.cuda.is_available() else place_in_engine
    os.environ.update(
        rank_environment(
            place_in_engine, num_ranks, address=address, port=port, local_rank=local_rank
        )
    )
