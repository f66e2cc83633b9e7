"""Copies of many small tensors to a GPU, or from it, at once: each waits by itself otherwise."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes at which each tensor begins, so that kernels may read it in vectors."""


def move_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on a device; to a GPU in one copy of pinned memory, for which nothing waits.

    Results on a GPU are parts of one buffer, which lives as long as any of them.

    Args:
        tensors: Of any type and shape.
        device: Where they are wanted.

    Returns:
        As many; what is on the device already is returned as it is.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    from_host = [index for index, tensor in enumerate(tensors) if tensor.device.type == "cpu"]
    found = [tensor.to(device) if tensor.device.type != "cpu" else tensor for tensor in tensors]
    starts, end = [], 0
    for index in from_host:
        starts.append(end)
        end += -(-tensors[index].nbytes // _ALIGNMENT) * _ALIGNMENT
    if not end:
        return [tensor.to(device) for tensor in found]
    # Torch keeps pinned memory for the next call, until the copy that reads it is done.
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    for index, start in zip(from_host, starts, strict=True):
        _part(buffer, start, tensors[index]).copy_(tensors[index])
    moved = buffer.to(device, non_blocking=True)
    for index, start in zip(from_host, starts, strict=True):
        found[index] = _part(moved, start, tensors[index])
    return found


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU; from a GPU in one copy, for which this waits once."""
    if len(tensors) < 2 or any(tensor.device.type != "cuda" for tensor in tensors):
        return [tensor.cpu() for tensor in tensors]
    parts, starts, end = [], [], 0
    for tensor in tensors:
        filler = -tensor.nbytes % _ALIGNMENT
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        parts.append(torch.nn.functional.pad(flat, (0, filler)))
        starts.append(end)
        end += tensor.nbytes + filler
    buffer = torch.cat(parts).cpu()
    return [_part(buffer, start, like) for start, like in zip(starts, tensors, strict=True)]


def numbers_of(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Tensors without dimensions as numbers, as `item` returns them; waits for a GPU once."""
    if len({value.device for value in values.values()}) != 1:
        return {name: value.item() for name, value in values.items()}
    found = [value.detach().double().reshape(()) for value in values.values()]
    one_type = torch.stack(found).tolist()
    return {
        name: number if value.is_floating_point() else int(number)
        for (name, value), number in zip(values.items(), one_type, strict=True)
    }


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
