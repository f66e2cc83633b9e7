"""A check of every process group before the first step: a sum whose value is known.

A rank that hangs, or a network between two machines that drops or changes bytes, would otherwise
show after the full timeout of a collective, or as a loss that is wrong. Ranks first meet in the
store that they have joined the group by, which needs no collective, so that the error names those
that did not come.
"""

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nemo_rl_core.distributed.process_group import local_device, rank, world_size
from nemo_rl_core.errors import MachineError

CHECK_SECONDS = 60.0
_NUM_VALUES = 1 << 16
"""Of the sum: 512 KiB, so that more than one packet is sent."""
_POLL_SECONDS = 0.002

_checked: set[tuple[int, str, tuple[int, ...]]] = set()
"""Groups of this process that have passed: the id of the world's group, a name, and the ranks."""


def check_collectives(
    groups: Mapping[str, dist.ProcessGroup], *, timeout_seconds: float = CHECK_SECONDS
) -> None:
    """Sums known values over groups that have not been checked yet; a collective of all ranks.

    Args:
        groups: Those of this rank, by the name of their axis; in one order on all ranks. The group
            of all ranks is checked first, as `world`.
        timeout_seconds: For each group.

    Raises:
        MachineError: If a rank does not come, a sum does not end in time, or its value is wrong;
            names the ranks and their machines.
    """
    world = dist.group.WORLD
    assert world is not None
    # The fake process group of torch, over which plans are tested, sums nothing.
    if world_size() == 1 or dist.get_backend() == "fake":
        return
    for name, group in {"world": world, **groups}.items():
        ranks = tuple(dist.get_process_group_ranks(group))
        key = id(world), name, ranks
        if key not in _checked and len(ranks) > 1:
            _check(name, group, ranks, timeout_seconds)
        _checked.add(key)


def _check(
    name: str, group: dist.ProcessGroup, ranks: tuple[int, ...], timeout_seconds: float
) -> None:
    roll = _Roll(f"{name}:{'-'.join(map(str, ranks))}", ranks)
    missing = roll.come("start", timeout_seconds)
    if missing:
        raise _refused(
            f"{roll.named(missing)} did not come to the check of the group {name!r}",
            got=f"{len(ranks) - len(missing)} of {len(ranks)} ranks within {timeout_seconds:.0f} s",
            fix="look at what that process does (its log, py-spy dump), and at its machine",
        )
    values = torch.full((_NUM_VALUES,), rank() + 1, dtype=torch.int64, device=local_device())
    is_done = _ends(group, values, timeout_seconds)
    expected = sum(ranks) + len(ranks)
    found = {int(values.min()), int(values.max())} if is_done else set()
    if is_done:
        roll.say("end")
    else:
        missing = roll.come("end", _POLL_SECONDS) or [rank()]
        raise _refused(
            f"a sum over the group {name!r} did not end",
            got=f"nothing from {roll.named(missing)} within {timeout_seconds:.0f} s",
            fix="the network between these machines: open the ports, name its interface in "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, and see NCCL_DEBUG=INFO",
        )
    if found != {expected}:
        raise _refused(
            f"a sum over the group {name!r} is wrong on {roll.named([rank()])}",
            expected=f"{expected} from {roll.named(ranks)}",
            got=" to ".join(str(value) for value in sorted(found)),
            fix="memory or network of one of these machines changes bytes: leave it out, and run "
            "its vendor's test of hardware",
        )


def _refused(problem: str, *, got: str, fix: str, expected: str | None = None) -> MachineError:
    return MachineError(
        problem, expected=expected or "all ranks, and the sum of them", got=got, fix=fix
    )


def _ends(group: dist.ProcessGroup, values: torch.Tensor, timeout_seconds: float) -> bool:
    """Sums in place; False if that takes too long.

    In a thread of its own, which is left behind where it does: the first collective of a group
    makes NCCL's communicator, and the call itself waits for all ranks then, for as long as the
    timeout of the group.
    """
    ended = Future[None]()

    def sum_up() -> None:
        try:
            if values.is_cuda:
                torch.cuda.set_device(values.device)  # each thread has its own
            work = dist.all_reduce(values, group=group, async_op=True)
            while not work.is_completed():
                time.sleep(_POLL_SECONDS)
            work.wait()  # raises what the sum has raised
            ended.set_result(None)
        # Named fault boundary: raised again by the thread that waits.
        except BaseException as error:  # noqa: BLE001
            ended.set_exception(error)

    threading.Thread(target=sum_up, name="collective check", daemon=True).start()
    try:
        ended.result(timeout_seconds)
    except TimeoutError:
        if ended.done():
            raise  # the sum's own
        return False
    return True


class _Roll:
    """Which ranks of a group have come how far, in the store that all have joined."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        joined = distributed_c10d._get_default_store()
        self._store = distributed_c10d.PrefixStore(f"collective_check/{name}", joined)
        self._ranks = ranks
        self._store.set(f"host/{rank()}", f"{socket.gethostname()}, process {os.getpid()}")

    def say(self, stage: str, value: str = "here") -> None:
        """Records how far this rank has come."""
        self._store.set(f"{stage}/{rank()}", value)

    def come(self, stage: str, timeout_seconds: float) -> list[int]:
        """Waits for the others; returns those that are missing."""
        if stage == "start":
            self.say(stage)
        keys = {each: f"{stage}/{each}" for each in self._ranks}
        with suppress(dist.DistStoreError):
            self._store.wait(list(keys.values()), timedelta(seconds=timeout_seconds))
            return []
        return [each for each, key in keys.items() if not self._store.check([key])]

    def named(self, ranks: Sequence[int]) -> str:
        """Ranks with their machines, where they have said them."""
        said = []
        for each in ranks:
            key = f"host/{each}"
            place = self._store.get(key).decode() if self._store.check([key]) else "unknown host"
            said.append(f"rank {each} ({place})")
        return ", ".join(said)
