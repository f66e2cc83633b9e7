"""Splitting and gathering of rows over context ranks, forward and backward."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def packed_causal_mask(last: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns a `[R, 1, L / ranks, L]` causal mask: True for allowed keys of this rank's queries.

    Args:
        last: `[R, L]` last column whose token attends to each one; see `PackedRows`.
    """
    keys = torch.arange(last.shape[1], device=last.device)
    queries = (keys if group is None else rank_part(keys, group, dim=0))[:, None]
    return ((keys <= queries) & (queries <= last[:, None, :]))[:, None]


def rank_part(values: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Returns this rank's consecutive part of a dimension along the tokens of a row."""
    return values.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def gathered_parts(part: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Concatenates the parts of all ranks along a dimension, without gradients."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim)


def spread_parts(
    parts: Iterable[Tensor], indices: Tensor, length: int, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Returns `[length, ...]` tensors on every rank, from a rank's parts at `[n]` indices."""
    spread = (part.new_zeros(length, *part.shape[1:]).index_put((indices,), part) for part in parts)
    return tuple(_SumParts.apply(part, group) for part in spread)  # type: ignore[no-untyped-call]


def full_rows(part: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Concatenates equal parts of all ranks along a dimension; sums gradients over the ranks."""
    rows: Tensor = _FullRows.apply(part, group, dim)  # type: ignore[no-untyped-call]
    return rows


class _SumParts(torch.autograd.Function):
    """Passes each gradient to every rank; only the rank that computed the position uses it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _FullRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gathered_parts(part, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        parts = gradients[0].chunk(dist.get_world_size(ctx.group), dim=ctx.dim)
        gradient = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_single(gradient, torch.cat(parts), group=ctx.group)
        return gradient, None, None
