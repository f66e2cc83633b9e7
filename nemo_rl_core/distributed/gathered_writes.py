"""Writing of weights that all ranks gather and only rank 0 writes.

NCCL counts a collective's timeout from the moment it is enqueued. Ranks that drop what they gather
would enqueue all gathers of a model at once, and each gather would wait for the disk of rank 0: a
save that takes longer than the timeout would end every rank. So the other ranks gather a tensor
only after rank 0 has asked for it. They wait for that on gloo, with a timeout that fits one file.
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
"""Time limit between two tensors, in which rank 0 writes at most one file of 4 GiB."""
_CONTINUE, _FAILED = 0, 1


def write_on_rank_0(named_tensors: NamedTensors, write: Callable[[NamedTensors], object]) -> None:
    """Calls `write` on rank 0 with tensors that all ranks gather; a collective of all ranks.

    Returns on every rank when rank 0 has written everything. No gather starts before rank 0 joins
    it.

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
        with suppress(RuntimeError):  # other ranks have ended: the first error says more
            _from_rank_0(_FAILED, group)
        raise
    _from_rank_0(_CONTINUE, group)


def _announced(
    named_tensors: NamedTensors, group: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors; before each one, rank 0 broadcasts that it is to be gathered."""
    tensors = iter(named_tensors)
    while True:
        _from_rank_0(_CONTINUE, group)
        named_tensor = next(tensors, None)
        if named_tensor is None:
            return
        yield named_tensor


def _follow(named_tensors: NamedTensors, group: dist.ProcessGroup) -> None:
    """Gathers each tensor after rank 0 has asked for it, and waits for the end of the last file."""
    for _ in _announced(named_tensors, group):
        pass
    _from_rank_0(_CONTINUE, group)


def _from_rank_0(state: int, group: dist.ProcessGroup) -> None:
    """Sends the state of rank 0 to the others; each waits for it."""
    sent = torch.tensor([state])
    dist.broadcast(sent, src=0, group=group)
    if rank() != 0 and int(sent) == _FAILED:
        raise StoreError(
            "rank 0 could not write the model",
            expected="a complete model folder",
            got="an error on rank 0",
            fix="see the error of rank 0, in the log of its worker",
        )


def _group() -> dist.ProcessGroup | None:
    """Returns a gloo group of all ranks; None if there is one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    return _gloo_group(world)


@cache
def _gloo_group(_: dist.ProcessGroup) -> dist.ProcessGroup:
    """Creates a separate group, since the world group has the timeout of a collective."""
    group = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group
