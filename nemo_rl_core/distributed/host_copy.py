"""Copies many small tensors to or from a GPU at once, so that the host waits only once."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Alignment of each tensor in bytes, so that kernels may read it in vectors."""


def move_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Moves tensors to a device; to a GPU by one asynchronous copy of pinned memory.

    Results on a GPU are views of one buffer, which lives as long as any of them.

    Returns:
        The tensors in the same order; those already on the device are returned unchanged.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    from_host = [index for index, tensor in enumerate(tensors) if tensor.device.type == "cpu"]
    on_device = [tensor.to(device) if tensor.device.type != "cpu" else tensor for tensor in tensors]
    starts, end = [], 0
    for index in from_host:
        starts.append(end)
        end += -(-tensors[index].nbytes // _ALIGNMENT) * _ALIGNMENT
    if not end:
        return on_device
    # Torch does not reuse the pinned memory before the copy that reads it is done.
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    for index, start in zip(from_host, starts, strict=True):
        _part(buffer, start, tensors[index]).copy_(tensors[index])
    moved = buffer.to(device, non_blocking=True)
    for index, start in zip(from_host, starts, strict=True):
        on_device[index] = _part(moved, start, tensors[index])
    return on_device


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Moves tensors to the CPU; from a GPU by one copy, for which this waits once."""
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
    """Converts 0-dimensional tensors to numbers, like `item`, but waits for a GPU only once."""
    if len({value.device for value in values.values()}) != 1:
        return {name: value.item() for name, value in values.items()}
    doubles = [value.detach().double().reshape(()) for value in values.values()]
    numbers = torch.stack(doubles).tolist()
    return {
        name: number if value.is_floating_point() else int(number)
        for (name, value), number in zip(values.items(), numbers, strict=True)
    }


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
