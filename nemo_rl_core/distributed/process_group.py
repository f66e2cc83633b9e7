"""How ranks find one another and their GPU: what a launcher sets, read in one place."""

import os
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_core.distributed.ports import LOOPBACK, host_store
from nemo_rl_core.errors import ResourceError

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


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
        **network_environment(address),
    }


def network_environment(address: str) -> dict[str, str]:
    """Returns the environment in which workers on loopback listen on no other interface.

    By default gloo, NCCL and vLLM listen on the interface of the host's name. Variables that the
    user has set stay.

    Args:
        address: Address of the workers' machine as Ray knows it.

    Example:
        >>> network_environment("192.0.2.7")
        {}
    """
    if address != LOOPBACK:
        return {}
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK}
    return {name: value for name, value in loopback.items() if name not in os.environ}


def world_size() -> int:
    """How many ranks train together, by the environment; 1 where nothing says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's place among them."""
    return int(os.environ.get("RANK", "0"))


def visible_gpus() -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` calls the GPUs that this process sees, in CUDA's order."""
    import torch  # in the functions, so that what starts workers need not wait for it

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def own_gpu() -> str:
    """What `CUDA_VISIBLE_DEVICES` calls this rank's GPU, the same in every process of the machine.

    In a worker of Ray it is the GPU of the worker's bundle, whether Ray hides the others or not;
    elsewhere the one at `LOCAL_RANK`.

    Raises:
        ResourceError: If the process does not see the GPU that Ray has given it.
    """
    visible = visible_gpus()
    if len(visible) == 1:
        return visible[0]
    given = _gpu_of_ray()
    if given is None:
        return visible[int(os.environ.get("LOCAL_RANK", "0")) % len(visible)]
    if given not in visible:
        raise ResourceError(
            "a worker does not see the GPU of its bundle",
            expected=f"GPU {given} in CUDA_VISIBLE_DEVICES",
            got=",".join(visible),
            fix="leave CUDA_VISIBLE_DEVICES to Ray: take it out of the workers' environment",
        )
    return given


def _gpu_of_ray() -> str | None:
    """The GPU that Ray has given this worker; None outside of workers with a GPU."""
    if "ray" not in sys.modules:
        return None
    import ray

    if not ray.is_initialized():
        return None
    given: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return str(given[0]) if given else None


def local_device() -> "torch.device":
    """Where this rank computes: its own GPU, or the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", visible_gpus().index(own_gpu()))


TIMEOUT = "NEMO_RL_COLLECTIVE_TIMEOUT"
"""The environment variable with the seconds after which a collective is given up; the workers of a
cluster have it from `cluster.collective_timeout_seconds`."""
_TIMEOUT_SECONDS = 600.0
RECORDS = "TORCH_FR_DUMP_TEMP_FILE"
"""The environment variable with the path, but for the rank, of the files in which torch records the
last collectives of a rank when one of them times out (its flight recorder)."""


def collective_timeout() -> timedelta:
    """After which a collective that some rank does not join is given up, by the environment.

    Every group of ranks is made with it. One that is made without has torch's own, half an hour for
    groups of gloo and NCCL together, whatever the group of all ranks has.
    """
    return timedelta(seconds=float(os.environ.get(TIMEOUT, _TIMEOUT_SECONDS)))


def records_prefix(folder: Path, group: str, engine: int | None = None) -> str:
    """The value of `RECORDS` for a group of workers: `GROUP-rank_`, or `GROUP-engine_N-rank_`.

    Args:
        folder: For the files.
        group: Name of the group.
        engine: Number of the engine in it, if each engine counts its ranks from 0.
    """
    name = re.sub(r"[^\w.]", "_", group)
    return str(folder / (f"{name}-rank_" if engine is None else f"{name}-engine_{engine}-rank_"))


def split_records(engine: int) -> None:
    """Has this rank record its collectives as one of an engine, whose ranks count from 0."""
    prefix = Path(os.environ.get(RECORDS, ""))
    if prefix.name.endswith("-rank_"):  # else it is the user's
        group = prefix.name.removesuffix("-rank_")
        os.environ[RECORDS] = records_prefix(prefix.parent, group, engine)


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
    is_single = "WORLD_SIZE" not in os.environ
    timeout = timedelta(seconds=timeout_seconds) if timeout_seconds else collective_timeout()
    if is_single:
        os.environ.update(network_environment(LOOPBACK))
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        rank=0 if is_single else rank(),
        world_size=1 if is_single else world_size(),
        store=dist.HashStore() if is_single else meeting_store(timeout),  # type: ignore[attr-defined]
        timeout=timeout,
    )


def meeting_store(timeout: timedelta) -> "TCPStore":
    """Returns the store at which the ranks of the environment meet; waits until all have joined.

    Rank 0 hosts it, on the address at which the others find it and no other.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank() == 0:
        return host_store(address, port, world_size=world_size(), timeout=timeout)
    return TCPStore(address, port, world_size(), is_master=False, timeout=timeout)
