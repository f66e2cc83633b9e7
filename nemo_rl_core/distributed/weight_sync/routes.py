"""Chooses which trainer rank sends to which engine ranks, and by which transport.

`nemo-rl plan` and the transfer itself use it.

Every rank of a trainer has each gathered tensor. So an engine rank receives it from the trainer
rank that shares its GPU, without passing through another rank's memory.

| engine rank | sender | transport |
|---|---|---|
| on the GPU of a trainer rank | that rank | `cuda_ipc` |
| on a machine of the trainer, one end without a GPU | the first rank there | `shared_memory` |
| elsewhere | a rank that sends to nobody else if there is one, else rank 0 | `nccl`, `gloo` |
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TransportName = Literal["shared_memory", "cuda_ipc", "gloo", "nccl"]
GPU_BUCKET_BYTES = 256 * 1024**2
"""Size of a bucket between GPUs: few round trips, and two buckets fit next to any model."""


@dataclass(frozen=True)
class Location:
    """Location of a process.

    Attributes:
        machine: Identity of the machine, equal for processes that can open each other's files.
        gpu: Identity of the GPU, or None.
    """

    machine: str
    gpu: str | None


def current_location() -> Location:
    """Returns the location of this process."""
    import torch  # `nemo-rl plan` reads this module without it

    from nemo_rl_core.distributed.process_group import local_device

    gpu = None
    if torch.cuda.is_available():
        gpu = str(torch.cuda.get_device_properties(local_device()).uuid)
    return Location(current_machine(), gpu)


def current_machine() -> str:
    """Returns the hostname plus the PID namespace, because containers may share a hostname."""
    namespace = Path("/proc/self/ns/pid")
    namespace_id = namespace.readlink() if namespace.exists() else "none"
    return f"{socket.gethostname()} {namespace_id}"


@dataclass(frozen=True)
class Route:
    """A sender of weights and its receivers."""

    sender: int
    receivers: tuple[int, ...]
    transport: TransportName


def choose_routes(trainer: Sequence[Location], engine: Sequence[Location]) -> list[Route]:
    """Assigns a sending trainer rank to every engine rank.

    Example:
        >>> two_gpus = [Location("a", "0"), Location("a", "1")]
        >>> for route in choose_routes(two_gpus, two_gpus):
        ...     print(route)
        Route(sender=0, receivers=(0,), transport='cuda_ipc')
        Route(sender=1, receivers=(1,), transport='cuda_ipc')
    """
    receivers_of: dict[int, list[int]] = {}
    elsewhere = []
    for receiver, location in enumerate(engine):
        if (sender := _local_sender(trainer, location)) is None:
            elsewhere.append(receiver)
        else:
            receivers_of.setdefault(sender, []).append(receiver)
    if elsewhere:
        idle = [rank for rank in range(len(trainer)) if rank not in receivers_of]
        sender = idle[0] if idle else 0
        receivers_of[sender] = sorted([*receivers_of.get(sender, []), *elsewhere])
    return [
        Route(
            sender,
            tuple(receivers),
            choose_transport(trainer[sender], [engine[each] for each in receivers]),
        )
        for sender, receivers in sorted(receivers_of.items())
    ]


def _local_sender(trainer: Sequence[Location], receiver: Location) -> int | None:
    """Returns the trainer rank whose memory an engine rank can read, else None."""
    for rank, sender in enumerate(trainer):
        has_no_gpu = None in (sender.gpu, receiver.gpu)
        if sender.machine == receiver.machine and (has_no_gpu or sender == receiver):
            return rank
    return None


def choose_transport(sender: Location, receivers: Sequence[Location]) -> TransportName:
    """Returns the fastest transport that reaches all receivers of one sender."""
    ends = [sender, *receivers]
    on_one_machine = len({end.machine for end in ends}) == 1
    gpus = {end.gpu for end in ends}
    if None in gpus:
        return "shared_memory" if on_one_machine else "gloo"
    if len(gpus) == 1 and on_one_machine:
        return "cuda_ipc"
    if len(gpus) == len(ends):
        return "nccl"
    # NCCL refuses two ranks on one GPU.
    return "shared_memory" if on_one_machine else "gloo"
