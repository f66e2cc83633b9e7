"""Transfers of saved files by the machines of a Ray cluster that wrote them."""

from collections.abc import Callable, Sequence
from typing import Any

from nemo_rl_core.checkpoints.object_saves import LARGE_BYTES, Transfer, here
from nemo_rl_core.distributed.worker_group import wait_for_all

_PROCESSES_PER_MACHINE = 4
"""A client of S3 computes 1 to 7 CPU seconds a GiB: one process does not fill a machine's port."""


def on_machines(
    how: Callable[[Any, Sequence[Transfer]], None], system: Any, transfers: Sequence[Transfer]
) -> None:
    """Transfers files where they were written, each machine its own, in processes beside the ranks.

    What the machines of an earlier cluster wrote is divided among those of this one, a machine's
    files to one machine. Of files of no known machine large ones are divided among all. Small ones
    are transferred by this process, and so are all where there is no Ray cluster. A `Mover`.

    Args:
        how: `send`, `receive` or `deliver`.
        system: The `fsspec` file system; processes of the machines get a copy.
        transfers: The files, which all machines would find at the same paths.

    Raises:
        NemoRLError: As `how` raises it.
        RayError: If a machine or its process is lost.
    """
    machines = machines_with_workers()
    parts = {node: each for node, each in _dealt(transfers, machines).items() if each}
    own = parts.pop("", [])
    pending = [
        _task(how, node).remote(system, share)
        for node, each in parts.items()
        for share in balanced(each, _PROCESSES_PER_MACHINE)
    ]
    here(how, system, own)
    wait_for_all(pending, workers={})


def _task(how: Callable[[Any, Sequence[Transfer]], None], node: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    placed = NodeAffinitySchedulingStrategy(node, soft=False)
    # Ray would try a lost one again, on a machine that does not have the files.
    return ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=placed)(how)


def machines_with_workers() -> list[str]:
    """Ids of the machines that may have ranks; a head without CPUs has none.

    Empty where this process has no Ray cluster.
    """
    import ray

    if not ray.is_initialized():
        return []
    alive = (node for node in ray.nodes() if node["Alive"])
    return sorted(node["NodeID"] for node in alive if node["Resources"].get("CPU", 0) > 0)


def _dealt(transfers: Sequence[Transfer], machines: Sequence[str]) -> dict[str, list[Transfer]]:
    """The transfers by machine; an empty name is this process."""
    gone = sorted({each.file.machine for each in transfers} - {"", *machines})
    taker = {name: machines[place % len(machines)] for place, name in enumerate(gone) if machines}
    dealt: dict[str, list[Transfer]] = {}
    anyones: list[Transfer] = []
    for each in transfers:
        name = each.file.machine
        if machines and not name and each.file.num_bytes >= LARGE_BYTES:
            anyones.append(each)
        else:
            node = name if name in machines else taker.get(name, "")
            dealt.setdefault(node, []).append(each)
    for node, share in zip(machines, balanced(anyones, len(machines)), strict=False):
        dealt.setdefault(node, []).extend(share)
    return dealt


def balanced(transfers: Sequence[Transfer], num_parts: int) -> list[list[Transfer]]:
    """Transfers in at most so many parts of about equal size, none of them empty."""
    parts: list[list[Transfer]] = [[] for _ in range(min(num_parts, len(transfers)))]
    sizes = [0] * len(parts)
    for each in sorted(transfers, key=lambda each: -each.file.num_bytes):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(each)
        sizes[smallest] += each.file.num_bytes
    return parts
