"""Rendezvous of the ranks of one vLLM engine."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl_core.distributed.ports import LOOPBACK, host_store
from nemo_rl_core.distributed.process_group import (
    meeting_store,
    own_gpu,
    rank,
    rank_environment,
    split_records,
    visible_gpus,
    world_size,
)
from nemo_rl_core.distributed.weight_sync.routes import current_machine

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_POLL_SECONDS = 0.05
_START_TIMEOUT = timedelta(minutes=5)
_hosted: "list[TCPStore]" = []
"""The store of the engine if this process is its first rank; kept while the process runs."""
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
        and leftovers of a killed engine would block all later ones.
        """

        def _distributed_args(self) -> tuple[str, int, int]:
            _, rank, local_rank = super()._distributed_args()
            address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return address, rank, local_rank

    return NamedLauncher


def unlink_shared_memory() -> None:
    """Unlinks the shared memory of a running engine after all its ranks have mapped it.

    The system then frees the memory even if the processes are killed.
    """
    from vllm.distributed import get_tp_group

    for path in _SHARED_MEMORY.glob(f"{os.environ['MASTER_PORT']}-*-cpushm_*"):
        path.unlink(missing_ok=True)
    # Only ranks on one machine have shared memory.
    ring: Any = getattr(get_tp_group().mq_broadcaster, "buffer", None)
    if ring is not None and ring.is_creator:
        ring.shared_memory.unlink()
        ring.is_creator = False  # the creator would unlink it again at exit


@dataclass(frozen=True)
class EngineRank:
    """Location of an engine's rank; `gpu` is its entry in `CUDA_VISIBLE_DEVICES`, if any."""

    machine: str
    gpu: str | None

    @classmethod
    def of_this_process(cls) -> "EngineRank":
        """Returns the location of this process."""
        return cls(current_machine(), own_gpu() if torch.cuda.is_available() else None)


def join_engine(num_ranks: int) -> list[str] | None:
    """Restricts this rank's environment variables to the ranks of its engine.

    All workers know the address of the first worker. Its store has the address of each engine's
    first rank and the location of every rank.

    Returns:
        The GPUs of the engine's ranks on this machine, in rank order, for vLLM's `device_ids`;
        `LOCAL_RANK` is this rank's index among them. vLLM looks up the GPUs of other ranks by their
        ranks, such as for its custom all-reduce. None without GPUs.
    """
    import ray

    num_workers, global_rank = world_size(), rank()
    engine, rank_in_engine = divmod(global_rank, num_ranks)
    is_host = global_rank == 0
    store = meeting_store(_START_TIMEOUT)
    if rank_in_engine == 0:
        is_local = os.environ["MASTER_ADDR"] == LOOPBACK
        own_address = LOOPBACK if is_local else ray.util.get_node_ip_address()
        _hosted.append(host_store(own_address, 0, wait_for_workers=False))
        store.set(f"engine {engine}", json.dumps([own_address, _hosted[-1].port]))
    store.set(f"rank {global_rank}", json.dumps(asdict(EngineRank.of_this_process())))
    address, port = json.loads(store.get(f"engine {engine}"))
    first = engine * num_ranks
    ranks = [
        EngineRank(**json.loads(store.get(f"rank {each}")))
        for each in range(first, first + num_ranks)
    ]
    # The store ends with its host, so the host waits until all ranks have read from it.
    store.add("read", 1)
    while is_host and store.add("read", 0) < num_workers:
        time.sleep(_POLL_SECONDS)
    split_records(engine)
    local_rank, gpus = local_ranks(ranks, rank_in_engine)
    os.environ.update(
        rank_environment(
            rank_in_engine, num_ranks, address=address, port=port, local_rank=local_rank
        )
    )
    # Makes vLLM connect to the store of `_hosted` instead of hosting one on every interface.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return gpus


def gpu_of_single_rank() -> list[str] | None:
    """Returns vLLM's `device_ids` for an engine with one rank; None if no other GPU is visible."""
    sees_others = torch.cuda.is_available() and len(visible_gpus()) > 1
    return [own_gpu()] if sees_others else None


def local_ranks(ranks: Sequence[EngineRank], rank: int) -> tuple[int, list[str] | None]:
    """Returns a rank's index among the ranks on its machine, and their GPUs (None without GPUs).

    Example:
        >>> ranks = [EngineRank("a", "4"), EngineRank("b", "1"), EngineRank("b", "0")]
        >>> local_ranks(ranks, 2)
        (1, ['1', '0'])
    """
    machine = ranks[rank].machine
    ranks_on_machine = [index for index, each in enumerate(ranks) if each.machine == machine]
    gpus = [gpu for index in ranks_on_machine if (gpu := ranks[index].gpu) is not None]
    return ranks_on_machine.index(rank), gpus or None
