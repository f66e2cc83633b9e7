"""Transfers saved files on the machines of a Ray cluster that wrote them."""

from collections.abc import Callable, Sequence
from typing import Any

from nemo_rl_core.checkpoints.object_saves import LARGE_BYTES, Transfer, transfer_in_this_process
from nemo_rl_core.distributed.worker_group import wait_for_all

_PROCESSES_PER_MACHINE = 4
"""An S3 client takes 1 to 7 CPU seconds per GiB: one process cannot saturate the network."""


def on_machines(
    how: Callable[[Any, Sequence[Transfer]], None], system: Any, transfers: Sequence[Transfer]
) -> None:
    """Transfers each file on the machine that wrote it, in separate processes; a `Mover`.

    The files of each machine of an earlier cluster go to one machine of this cluster. Large files
    of unknown machines are divided among all machines. This process transfers the small ones, and
    all files if there is no Ray cluster.
    """
    machines = machines_with_workers()
    shards = _shard_by_machine(transfers, machines)
    local_shard = shards.pop("", [])
    pending = [
        _task(how, node).remote(system, part)
        for node, shard in shards.items()
        for part in balanced(shard, _PROCESSES_PER_MACHINE)
    ]
    transfer_in_this_process(how, system, local_shard)
    wait_for_all(pending, workers={})


def _task(how: Callable[[Any, Sequence[Transfer]], None], node: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    # Ray would retry a lost task on a machine that does not have the files.
    return ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_node)(how)


def machines_with_workers() -> list[str]:
    """Returns the ids of machines that may run ranks, which excludes a head without CPUs.

    Empty if this process has no Ray cluster.
    """
    import ray

    if not ray.is_initialized():
        return []
    alive = (node for node in ray.nodes() if node["Alive"])
    return sorted(node["NodeID"] for node in alive if node["Resources"].get("CPU", 0) > 0)


def _shard_by_machine(
    transfers: Sequence[Transfer], machines: Sequence[str]
) -> dict[str, list[Transfer]]:
    """Assigns the transfers to machines; an empty name is this process."""
    lost_machines = sorted({each.file.machine for each in transfers} - {"", *machines})
    successor = {
        name: machines[index % len(machines)]
        for index, name in enumerate(lost_machines)
        if machines
    }
    shards: dict[str, list[Transfer]] = {}
    unassigned: list[Transfer] = []
    for each in transfers:
        name = each.file.machine
        if machines and not name and each.file.num_bytes >= LARGE_BYTES:
            unassigned.append(each)
        else:
            node = name if name in machines else successor.get(name, "")
            shards.setdefault(node, []).append(each)
    for node, part in zip(machines, balanced(unassigned, len(machines)), strict=False):
        shards.setdefault(node, []).extend(part)
    return shards


def balanced(transfers: Sequence[Transfer], num_parts: int) -> list[list[Transfer]]:
    """Splits transfers into at most `num_parts` non-empty parts of about equal size."""
    parts: list[list[Transfer]] = [[] for _ in range(min(num_parts, len(transfers)))]
    sizes = [0] * len(parts)
    for each in sorted(transfers, key=lambda each: -each.file.num_bytes):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(each)
        sizes[smallest] += each.file.num_bytes
    return parts
