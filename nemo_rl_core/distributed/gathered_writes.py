"""Writing of weights that all ranks gather and rank 0 alone writes.

NCCL counts a collective's timeout from the moment it is enqueued. Ranks that drop what they gather
would enqueue all gathers of a model at once, and each would wait for the disk of rank 0: a save
that takes longer than the timeout would end every rank. So the other ranks ask for a tensor only
after rank 0 has asked for it, and wait for that on gloo, whose timeout is that of one file.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.errors import StoreError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
_WRITE_TIMEOUT = timedelta(hours=1)
"""For what rank 0 does between two tensors: it writes one file of 4 GiB at most."""
_GO_ON, _FAILED = 0, 1


def write_on_rank_0(named_tensors: NamedTensors, write: Callable[[NamedTensors], object]) -> None:
    """Calls `write` on rank 0 with tensors that all ranks gather; a collective of all ranks.

    Returns on every rank when rank 0 has written everything. No collective of the tensors is begun
    before rank 0 joins it.

    Args:
        named_tensors: Whole tensors by name. Reading the next one is a collective.
        write: Reads all of them, in order.

    Raises:
        StoreError: On the other ranks, if `write` fails on rank 0, which raises its own error.
    """
    group = _group()
    if group is None:
        write(named_tensors)
    elif rank() == 0:
        _write(named_tensors, write, group)
    else:
        _follow(named_tensors, group)


def _write(
    named_tensors: NamedTensors, write: Callable[[NamedTensors], object], group: dist.ProcessGroup
) -> None:
    try:
        write(_announced(named_tensors, group))
    except BaseException:
        with suppress(RuntimeError):  # of ranks that have ended: the first error says more
            _from_rank_0(_FAILED, group)
        raise
    _from_rank_0(_GO_ON, group)


def _announced(
    named_tensors: NamedTensors, group: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors; before each one rank 0 broadcasts that it is to be gathered."""
    tensors = iter(named_tensors)
    while True:
        _from_rank_0(_GO_ON, group)
        found = next(tensors, None)
        if found is None:
            return
        yield found


def _follow(named_tensors: NamedTensors, group: dist.ProcessGroup) -> None:
    """Gathers each tensor after rank 0 has asked for it, and waits for the end of the last file."""
    for _ in _announced(named_tensors, group):
        pass
    _from_rank_0(_GO_ON, group)


def _from_rank_0(state: int, group: dist.ProcessGroup) -> None:
    """Sends the state of rank 0 to the others; each waits for it.

    Raises:
        StoreError: On the other ranks, if rank 0 has failed.
    """
    sent = torch.tensor([state])
    dist.broadcast(sent, src=0, group=group)
    if rank() != 0 and int(sent) == _FAILED:
        raise StoreError(
            "rank 0 could not write the model",
            expected="a whole model folder",
            got="an error on rank 0",
            fix="see the error of rank 0, in the log of its worker",
        )


def _group() -> dist.ProcessGroup | None:
    """The ranks on gloo; None if there is one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    return _gloo_group(world)


@cache
def _gloo_group(_: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of its own, since that of all ranks has the timeout of a collective."""
    group = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group
