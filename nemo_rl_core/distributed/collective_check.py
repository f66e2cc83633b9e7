"""Checks every process group before the first step by a sum whose value is known.

A rank that hangs, or a network that drops or changes bytes, would otherwise show only after the
full timeout of a collective, or as a wrong loss. Ranks first meet in the store through which they
joined the group. That needs no collective, so the error can name the missing ranks.
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
"""Length of the summed tensor: 512 KiB, so that more than one packet is sent."""
_POLL_SECONDS = 0.002

_checked: set[tuple[int, str, tuple[int, ...]]] = set()
"""Groups of this process that have passed: id of the world group, name, and ranks."""


def check_collectives(
    groups: Mapping[str, dist.ProcessGroup], *, timeout_seconds: float = CHECK_SECONDS
) -> None:
    """Sums known values over groups that have not been checked yet; a collective of all ranks.

    Args:
        groups: Groups of this rank by the name of their axis, in the same order on all ranks. The
            group of all ranks is checked first, as `world`.
    """
    world = dist.group.WORLD
    assert world is not None
    # Tests of plans use torch's fake process group, which sums nothing.
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
    missing = roll.wait("start", timeout_seconds)
    if missing:
        raise _refused(
            f"{roll.describe(missing)} did not join the check of the group {name!r}",
            got=f"{len(ranks) - len(missing)} of {len(ranks)} ranks within {timeout_seconds:.0f} s",
            fix="check what that process is doing (its log, py-spy dump), and its machine",
        )
    values = torch.full((_NUM_VALUES,), rank() + 1, dtype=torch.int64, device=local_device())
    is_done = _sum_ends(group, values, timeout_seconds)
    expected = sum(ranks) + len(ranks)
    sums = {int(values.min()), int(values.max())} if is_done else set()
    if is_done:
        roll.report("end")
    else:
        missing = roll.wait("end", _POLL_SECONDS) or [rank()]
        raise _refused(
            f"a sum over the group {name!r} did not end",
            got=f"nothing from {roll.describe(missing)} within {timeout_seconds:.0f} s",
            fix="check the network between these machines: open the ports, name its interface in "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, and look at the log with NCCL_DEBUG=INFO",
        )
    if sums != {expected}:
        raise _refused(
            f"a sum over the group {name!r} is wrong on {roll.describe([rank()])}",
            expected=f"{expected} from {roll.describe(ranks)}",
            got=" to ".join(str(value) for value in sorted(sums)),
            fix="the memory or network of one of these machines corrupts data: exclude it, and run "
            "its vendor's hardware test",
        )


def _refused(problem: str, *, got: str, fix: str, expected: str | None = None) -> MachineError:
    return MachineError(problem, expected=expected or "all ranks and their sum", got=got, fix=fix)


def _sum_ends(group: dist.ProcessGroup, values: torch.Tensor, timeout_seconds: float) -> bool:
    """Sums in place; False if that takes too long.

    Runs in a separate thread, which is abandoned on a timeout: the first collective of a group
    creates NCCL's communicator, and that call waits for all ranks, up to the timeout of the group.
    """
    ended = Future[None]()

    def sum_up() -> None:
        try:
            if values.is_cuda:
                torch.cuda.set_device(values.device)  # the current device is per thread
            work = dist.all_reduce(values, group=group, async_op=True)
            while not work.is_completed():
                time.sleep(_POLL_SECONDS)
            work.wait()  # raises the sum's error
            ended.set_result(None)
        # Broad on purpose: raised again by the thread that waits.
        except BaseException as error:  # noqa: BLE001
            ended.set_exception(error)

    threading.Thread(target=sum_up, name="collective check", daemon=True).start()
    try:
        ended.result(timeout_seconds)
    except TimeoutError:
        if ended.done():
            raise  # the sum's own error
        return False
    return True


class _Roll:
    """Records in the common store which ranks of a group have reached which stage."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        joined = distributed_c10d._get_default_store()
        self._store = distributed_c10d.PrefixStore(f"collective_check/{name}", joined)
        self._ranks = ranks
        self._store.set(f"host/{rank()}", f"{socket.gethostname()}, process {os.getpid()}")

    def report(self, stage: str) -> None:
        self._store.set(f"{stage}/{rank()}", "here")

    def wait(self, stage: str, timeout_seconds: float) -> list[int]:
        """Waits for the other ranks; returns the missing ones."""
        if stage == "start":
            self.report(stage)
        keys = {each: f"{stage}/{each}" for each in self._ranks}
        with suppress(dist.DistStoreError):
            self._store.wait(list(keys.values()), timedelta(seconds=timeout_seconds))
            return []
        return [each for each, key in keys.items() if not self._store.check([key])]

    def describe(self, ranks: Sequence[int]) -> str:
        texts = []
        for number in ranks:
            key = f"host/{number}"
            host = self._store.get(key).decode() if self._store.check([key]) else "unknown host"
            texts.append(f"rank {number} ({host})")
        return ", ".join(texts)
