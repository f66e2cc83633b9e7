"""Trainer state that moves to the host's memory while an engine uses the GPU.

Only the storage of a tensor is freed and filled again; the tensor object stays, so that parameters,
their views, references in FSDP2 and Megatron and the optimizer's keys remain valid. Without a GPU
the same copies are made within the host's memory.

Torch rounds pinned memory up to a power of two: a shard of 34 MiB would take 64. The bytes of a
part are therefore stored consecutively in blocks whose sizes are powers of two.
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
"""Parts that leave the GPU, by `training.offload_for_generation`."""

Tensors = Callable[[], Iterable[torch.Tensor]]
_BLOCK_BYTES = 64 * 2**20


class _Away(NamedTuple):
    storages: list[torch.UntypedStorage]
    sizes: list[int]
    blocks: list[torch.Tensor]

    @property
    def pieces(self) -> Iterator[list[torch.Tensor]]:
        blocks = iter(self.blocks)
        block = next(blocks, None)
        for size in self.sizes:
            slices, missing = [], size
            while missing:
                assert block is not None
                if not len(block):
                    block = next(blocks)
                slices.append(block[:missing])
                block, missing = block[missing:], missing - len(slices[-1])
            yield slices


class OffloadedState:
    """Named parts of a trainer's state, each on the device or on the host.

    Memory that two parts share belongs to the first one.
    """

    def __init__(self, parts: Mapping[str, Tensors]) -> None:
        self._parts = parts
        self._away: dict[str, _Away] = {}
        self._free: dict[int, list[torch.Tensor]] = {}

    def offload(self, names: Iterable[str]) -> None:
        """Moves these parts to the host; no-op for parts that are there already."""
        for name in names:
            if name in self._parts and name not in self._away:
                self._away[name] = self._moved(self._storages(name))

    def restore(self, *names: str) -> None:
        """Moves these parts back to the device; no-op for parts that are there already."""
        moved = [self._away.pop(name) for name in names if name in self._away]
        for away in moved:
            for storage, size, pieces in zip(away.storages, away.sizes, away.pieces, strict=True):
                storage.resize_(size)
                for view, piece in _matched(_bytes_of(storage), pieces):
                    view.copy_(piece, non_blocking=True)
        if moved:
            _wait()
        for away in moved:
            for block in away.blocks:
                self._free.setdefault(len(block), []).append(block)

    def _storages(self, name: str) -> list[torch.UntypedStorage]:
        earlier: dict[int, torch.UntypedStorage] = {}
        for part, tensors in self._parts.items():
            storages = {each._cdata: each for tensor in tensors() for each in _storages_of(tensor)}
            if part == name:
                unshared = (storages[key] for key in storages.keys() - earlier.keys())
                return [each for each in unshared if each.nbytes() and each.resizable()]
            earlier |= storages
        return []

    def _moved(self, storages: list[torch.UntypedStorage]) -> _Away:
        sizes = [storage.nbytes() for storage in storages]
        away = _Away(storages, sizes, [*map(self._block, _block_sizes(sum(sizes)))])
        for storage, pieces in zip(storages, away.pieces, strict=True):
            for view, piece in _matched(_bytes_of(storage), pieces):
                piece.copy_(view, non_blocking=True)
        _wait()
        for storage in storages:
            storage.resize_(0)
        return away

    def _block(self, num_bytes: int) -> torch.Tensor:
        """Returns a block, pinned if there is a GPU; reuses blocks, since pinning is slow."""
        if self._free.get(num_bytes):
            return self._free[num_bytes].pop()
        is_pinned = torch.cuda.is_available()
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)


def _block_sizes(num_bytes: int) -> list[int]:
    """Returns block sizes for so many bytes, all powers of two: full blocks, and the rest."""
    num_full, rest = divmod(num_bytes, _BLOCK_BYTES)
    return [_BLOCK_BYTES] * num_full + ([1 << (rest - 1).bit_length()] if rest else [])


def _matched(
    storage_bytes: torch.Tensor, pieces: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields each piece of a block with the bytes of a storage that belong to it."""
    start = 0
    for piece in pieces:
        yield storage_bytes[start : start + len(piece)], piece
        start += len(piece)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yields the optimizer's state tensors, such as moments."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _storages_of(tensor: Any) -> Iterator[torch.UntypedStorage]:
    """Yields the storages on the device of a tensor or of the tensors that it consists of."""
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


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
