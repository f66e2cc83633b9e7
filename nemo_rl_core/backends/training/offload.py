"""State of a trainer that waits in the host's memory while an engine uses the GPU.

The memory of a tensor leaves, the tensor stays: its storage is emptied in place and filled again.
So parameters, views of them, FSDP2's and Megatron's own references and the optimizer's keys are the
same objects before and after, and no bit changes. Without a GPU the same moves are made within the
host's memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

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


class OffloadedState:
    """Named parts of a trainer's state, each on the device or on the host.

    Args:
        parts: For each name, a function that returns its tensors; those of an optimizer come with
            its first step. Memory that two parts share belongs to the first of them.
    """

    def __init__(self, parts: Mapping[str, Tensors]) -> None:
        self._parts = parts
        self._away: dict[str, list[tuple[torch.UntypedStorage, torch.Tensor]]] = {}
        self._free: dict[int, list[torch.Tensor]] = {}

    def offload(self, names: Iterable[str]) -> None:
        """Moves these parts to the host; no-op for those that are there."""
        for name in names:
            if name in self._parts and name not in self._away:
                self._away[name] = self._moved(self._own_storages(name))

    def restore(self, *names: str) -> None:
        """Moves these parts back; no-op for those that never left."""
        moved = [pair for name in names for pair in self._away.pop(name, [])]
        for storage, host in moved:
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host, non_blocking=True)
        if moved:
            _wait()
        for _, host in moved:
            self._free.setdefault(host.nbytes, []).append(host)

    def _own_storages(self, name: str) -> list[torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        for part, tensors in self._parts.items():
            storages = {_key(each): each for tensor in tensors() for each in _storages_of(tensor)}
            if part == name:
                own = (storages[key] for key in storages.keys() - found.keys())
                return [each for each in own if each.nbytes() and each.resizable()]
            found |= storages
        return []

    def _moved(
        self, storages: Iterable[torch.UntypedStorage]
    ) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
        moved = []
        for storage in storages:
            host = self._host_memory(storage.nbytes())
            host.copy_(_bytes_of(storage), non_blocking=True)
            moved.append((storage, host))
        _wait()
        for storage, _ in moved:
            storage.resize_(0)
        return moved

    def _host_memory(self, num_bytes: int) -> torch.Tensor:
        """Pinned where there is a GPU, and kept: pinning takes longer than the copy."""
        if self._free.get(num_bytes):
            return self._free[num_bytes].pop()
        is_pinned = torch.cuda.is_available()
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)


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
