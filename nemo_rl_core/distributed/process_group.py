"""How ranks find one another: the environment that a launcher sets, read in one place."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def rank_environment(
    rank: int, world_size: int, *, address: str, port: int, local_rank: int | None = None
) -> dict[str, str]:
    """What a worker's environment must hold before it calls `join_process_group`.

    Args:
        rank: Of the worker, from 0.
        world_size: How many workers there are.
        address: Where rank 0 runs.
        port: A free one on that machine.
        local_rank: Of the worker on its machine; the rank itself where there is one machine.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank if local_rank is None else local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def world_size() -> int:
    """How many ranks train together, by the environment; 1 where nothing says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's place among them."""
    return int(os.environ.get("RANK", "0"))


def local_device() -> "torch.device":
    """Where this rank computes: its own GPU, or the CPU."""
    import torch  # in the functions, so that what starts workers need not wait for it

    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A worker often sees its own GPU alone, whatever its rank on the machine.
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


TIMEOUT = "NEMO_RL_COLLECTIVE_TIMEOUT"
"""The environment variable with the seconds after which a collective is given up; the workers of a
cluster have it from `cluster.collective_timeout_seconds`."""
_TIMEOUT_SECONDS = 600.0
RECORDS = "TORCH_FR_DUMP_TEMP_FILE"
"""The environment variable with the path, but for the rank, of the files in which torch records the
last collectives of a rank when one of them times out (its flight recorder)."""


def join_process_group(*, timeout_seconds: float | None = None) -> None:
    """Joins the ranks that the environment describes; again, or alone, that changes nothing.

    A process without `WORLD_SIZE` is the only rank of a group of one.

    Args:
        timeout_seconds: After which a collective that some rank does not join is an error; None
            takes that of the environment (`TIMEOUT`), else ten minutes.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device())  # what collectives and libraries take unasked
    alone = "WORLD_SIZE" not in os.environ
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        rank=0 if alone else rank(),
        world_size=1 if alone else world_size(),
        store=dist.HashStore() if alone else None,  # type: ignore[attr-defined]
        timeout=timedelta(
            seconds=timeout_seconds or float(os.environ.get(TIMEOUT, _TIMEOUT_SECONDS))
        ),
    )
