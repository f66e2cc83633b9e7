"""Which rank of a trainer sends to which ranks of an engine, and by which transport.

`nemo-rl plan` and the transfer itself choose them here.

Every rank of a trainer has each gathered tensor. So an engine's rank gets it from the rank that
shares its GPU, and no byte passes through another rank's memory.

| where the engine's rank is | who sends | transport |
|---|---|---|
| on the GPU of a rank of the trainer | that rank | `cuda_ipc` |
| on a machine of the trainer, one end without a GPU | the first rank there | `shared_memory` |
| elsewhere | one rank that sends to nobody else, where there is one; else rank 0 | `nccl`, `gloo` |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TransportName = Literal["shared_memory", "cuda_ipc", "gloo", "nccl"]
GPU_BUCKET_BYTES = 256 * 1024**2
"""Of a bucket between GPUs: few round trips, and two of them fit beside any model."""


@dataclass(frozen=True)
class Location:
    """Where a process runs.

    Attributes:
        machine: Equal for processes that can open one another's files.
        gpu: The identity of its GPU, or None.
    """

    machine: str
    gpu: str | None


@dataclass(frozen=True)
class Route:
    """What one rank of a trainer sends to some ranks of an engine.

    Attributes:
        sender: Rank of the trainer.
        receivers: Ranks of the engine's workers, in their order.
        transport: That reaches all of them.
    """

    sender: int
    receivers: tuple[int, ...]
    transport: TransportName


def choose_routes(trainer: Sequence[Location], engine: Sequence[Location]) -> list[Route]:
    """Gives every rank of an engine the rank of a trainer that sends to it.

    Args:
        trainer: Places of its ranks, of which there is at least one.
        engine: Places of the ranks of all engines.

    Returns:
        Routes in order of their senders, each of which has one.

    Example:
        >>> two_gpus = [Location("a", "0"), Location("a", "1")]
        >>> for route in choose_routes(two_gpus, two_gpus):
        ...     print(route)
        Route(sender=0, receivers=(0,), transport='cuda_ipc')
        Route(sender=1, receivers=(1,), transport='cuda_ipc')
    """
    found: dict[int, list[int]] = {}
    elsewhere = []
    for receiver, place in enumerate(engine):
        if (sender := _sender_beside(trainer, place)) is None:
            elsewhere.append(receiver)
        else:
            found.setdefault(sender, []).append(receiver)
    if elsewhere:
        idle = [rank for rank in range(len(trainer)) if rank not in found]
        sender = idle[0] if idle else 0
        found[sender] = sorted([*found.get(sender, []), *elsewhere])
    return [
        Route(
            sender,
            tuple(receivers),
            choose_transport(trainer[sender], [engine[each] for each in receivers]),
        )
        for sender, receivers in sorted(found.items())
    ]


def _sender_beside(trainer: Sequence[Location], place: Location) -> int | None:
    """The rank whose memory a rank of an engine can read; None if there is none."""
    for rank, each in enumerate(trainer):
        if each.machine == place.machine and (None in (each.gpu, place.gpu) or each == place):
            return rank
    return None


def choose_transport(sender: Location, receivers: Sequence[Location]) -> TransportName:
    """The fastest transport that reaches all receivers of one sender."""
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
