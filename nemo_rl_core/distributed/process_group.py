"""Process groups and devices of ranks, from the environment variables that a launcher sets."""

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
    """Returns the environment variables that `join_process_group` reads in a worker.

    Args:
        local_rank: Rank of the worker among those of its machine; None is `rank`.
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
    """Returns environment variables that keep workers on loopback from using other interfaces.

    By default gloo, NCCL and vLLM listen on the interface of the host's name. Variables that the
    user has set are kept.

    Example:
        >>> network_environment("192.0.2.7")
        {}
    """
    if address != LOOPBACK:
        return {}
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK}
    return {name: value for name, value in loopback.items() if name not in os.environ}


def world_size() -> int:
    """Returns the number of ranks that train together; 1 if the environment does not say."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Returns this process's rank among those that train together."""
    return int(os.environ.get("RANK", "0"))


def visible_gpus() -> list[str]:
    """Returns the names of this process's GPUs in `CUDA_VISIBLE_DEVICES`, in CUDA's order."""
    import torch  # in the functions, so that the code that starts workers need not wait for it

    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (
        visible_devices.split(",")
        if visible_devices
        else [str(index) for index in range(torch.cuda.device_count())]
    )


def own_gpu() -> str:
    """Returns the name of this rank's GPU in `CUDA_VISIBLE_DEVICES`, unique on the machine.

    In a Ray worker it is the GPU of the worker's bundle, whether or not Ray hides the others;
    elsewhere the one at index `LOCAL_RANK`.
    """
    visible = visible_gpus()
    if len(visible) == 1:
        return visible[0]
    assigned = _gpu_from_ray()
    if assigned is None:
        return visible[int(os.environ.get("LOCAL_RANK", "0")) % len(visible)]
    if assigned not in visible:
        raise ResourceError(
            "a worker does not see the GPU of its bundle",
            expected=f"GPU {assigned} in CUDA_VISIBLE_DEVICES",
            got=",".join(visible),
            fix="leave CUDA_VISIBLE_DEVICES to Ray: remove it from the workers' environment",
        )
    return assigned


def _gpu_from_ray() -> str | None:
    """Returns the GPU that Ray has assigned to this worker; None outside of workers with a GPU."""
    if "ray" not in sys.modules:
        return None
    import ray

    if not ray.is_initialized():
        return None
    assigned: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return str(assigned[0]) if assigned else None


def local_device() -> "torch.device":
    """Returns the device on which this rank computes: its GPU, or the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", visible_gpus().index(own_gpu()))


TIMEOUT = "NEMO_RL_COLLECTIVE_TIMEOUT"
"""Environment variable with the timeout of collectives in seconds; the workers of a cluster get it
from `cluster.collective_timeout_seconds`."""
_TIMEOUT_SECONDS = 600.0
RECORDS = "TORCH_FR_DUMP_TEMP_FILE"
"""Environment variable with the path prefix of the files in which torch records the last
collectives of a rank when one of them times out (its flight recorder); the rank is appended."""


def collective_timeout() -> timedelta:
    """Returns how long a collective waits for a rank that does not join it, from the environment.

    Every group of ranks must be created with it: without it, torch uses half an hour for groups
    with both gloo and NCCL, whatever the timeout of the world group.
    """
    return timedelta(seconds=float(os.environ.get(TIMEOUT, _TIMEOUT_SECONDS)))


def records_prefix(folder: Path, group: str, engine: int | None = None) -> str:
    """Returns `RECORDS` for a group of workers: `GROUP-rank_`, or `GROUP-engine_N-rank_`.

    Args:
        engine: Index of the engine in the group, if each engine counts its ranks from 0.
    """
    name = re.sub(r"[^\w.]", "_", group)
    return str(folder / (f"{name}-rank_" if engine is None else f"{name}-engine_{engine}-rank_"))


def split_records(engine: int) -> None:
    """Sets `RECORDS` for a rank of an engine, whose ranks count from 0."""
    prefix = Path(os.environ.get(RECORDS, ""))
    if prefix.name.endswith("-rank_"):  # else the user has set it
        group = prefix.name.removesuffix("-rank_")
        os.environ[RECORDS] = records_prefix(prefix.parent, group, engine)


def join_process_group(*, timeout_seconds: float | None = None) -> None:
    """Joins the process group that the environment describes; a second call does nothing.

    A process without `WORLD_SIZE` is the only rank of its group.

    Args:
        timeout_seconds: Timeout of collectives; None takes it from the environment (`TIMEOUT`),
            else ten minutes.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device())  # the default of collectives and libraries
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

    Rank 0 hosts it, only on the address to which the others connect.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank() == 0:
        return host_store(address, port, world_size=world_size(), timeout=timeout)
    return TCPStore(address, port, world_size(), is_master=False, timeout=timeout)
