"""State of a trainer that waits in the host's memory while an engine uses the GPU.

The memory of a tensor leaves, the tensor stays: its storage is emptied in place and filled again.
So parameters, views of them, FSDP2's and Megatron's own references and the optimizer's keys are the
same objects before and after, and no bit changes. Without a GPU the same moves are made within the
host's memory.

Torch rounds pinned memory up to a power of two: a shard of 34 MiB would take 64. So the bytes of a
part lie one behind the other in blocks that are powers of two already.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from nemo_rl_core.config.training import Offload

PARTS: Mapping[Offload, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer",),
    "all": ("optimizer", "reference", "weights"),
}
"""What leaves the GPU, by `training.offload_for_generation`."""

Tensors = Callable[[], Iterable[torch.Tensor]]
_BLOCK_BYTES = 64 * 2**20


class _Away(NamedTuple):
    """A part on the host: its storages, and the blocks in which their bytes lie in this order."""

    storages: list[torch.UntypedStorage]
    sizes: list[int]
    blocks: list[torch.Tensor]

    @property
    def pieces(self) -> Iterator[list[torch.Tensor]]:
        """Of each storage, the parts of blocks that have its bytes."""
        blocks = iter(self.blocks)
        rest = next(blocks, None)
        for size in self.sizes:
            found, missing = [], size
            while missing:
                assert rest is not None
                if not len(rest):
                    rest = next(blocks)
                found.append(rest[:missing])
                rest, missing = rest[missing:], missing - len(found[-1])
            yield found


class OffloadedState:
    """Named parts of a trainer's state, each on the device or on the host.

    Args:
        parts: For each name, a function that returns its tensors; those of an optimizer come with
            its first step. Memory that two parts share belongs to the first of them.
    """

    def __init__(self, parts: Mapping[str, Tensors]) -> None:
        self._parts = parts
        self._away: dict[str, _Away] = {}
        self._free: dict[int, list[torch.Tensor]] = {}

    def offload(self, names: Iterable[str]) -> None:
        """Moves these parts to the host; no-op for those that are there."""
        for name in names:
            if name in self._parts and name not in self._away:
                self._away[name] = self._moved(self._own_storages(name))

    def restore(self, *names: str) -> None:
        """Moves these parts back; no-op for those that never left."""
        moved = [self._away.pop(name) for name in names if name in self._away]
        for away in moved:
            for storage, size, pieces in zip(away.storages, away.sizes, away.pieces, strict=True):
                storage.resize_(size)
                for own, piece in _side_by_side(_bytes_of(storage), pieces):
                    own.copy_(piece, non_blocking=True)
        if moved:
            _wait()
        for away in moved:
            for block in away.blocks:
                self._free.setdefault(len(block), []).append(block)

    def _own_storages(self, name: str) -> list[torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        for part, tensors in self._parts.items():
            storages = {_key(each): each for tensor in tensors() for each in _storages_of(tensor)}
            if part == name:
                own = (storages[key] for key in storages.keys() - found.keys())
                return [each for each in own if each.nbytes() and each.resizable()]
            found |= storages
        return []

    def _moved(self, storages: list[torch.UntypedStorage]) -> _Away:
        sizes = [storage.nbytes() for storage in storages]
        away = _Away(storages, sizes, [*map(self._block, _block_sizes(sum(sizes)))])
        for storage, pieces in zip(storages, away.pieces, strict=True):
            for own, piece in _side_by_side(_bytes_of(storage), pieces):
                piece.copy_(own, non_blocking=True)
        _wait()
        for storage in storages:
            storage.resize_(0)
        return away

    def _block(self, num_bytes: int) -> torch.Tensor:
        """Pinned where there is a GPU, and kept: pinning takes longer than the copy."""
        if self._free.get(num_bytes):
            return self._free[num_bytes].pop()
        is_pinned = torch.cuda.is_available()
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)


def _block_sizes(num_bytes: int) -> list[int]:
    """Powers of two that hold so many bytes: whole blocks, and one for the rest."""
    whole, rest = divmod(num_bytes, _BLOCK_BYTES)
    return [_BLOCK_BYTES] * whole + [1 << (rest - 1).bit_length()] * (rest > 0)


def _side_by_side(
    own: torch.Tensor, pieces: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece with the bytes of a storage that belong to it."""
    start = 0
    for piece in pieces:
        yield own[start : start + len(piece)], piece
        start += len(piece)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The state of all parameters, such as moments."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _storages_of(tensor: Any) -> Iterator[torch.UntypedStorage]:
    """Those of a tensor on the device, or of the tensors that it consists of."""
    if tensor.is_meta or (torch.cuda.is_available() and not tensor.is_cuda):
        return
    yield from (each.untyped_storage() for each in _plain(tensor))


def _plain(tensor: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensor, DTensor):
        yield from _plain(tensor.to_local())
    elif hasattr(tensor, "__tensor_flatten__"):  # such as moments in 8 bits with their scales
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _key(storage: torch.UntypedStorage) -> int:
    address: int = storage._cdata
    return address


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A view on all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
