"""Splitting and gathering of rows over context ranks; forward and backward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def packed_causal_mask(position_ids: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Causal mask of packed sequences, for this rank's queries and all keys of a row.

    Args:
        position_ids: `[R, L]`; restart at 0 with each sequence.
        group: The ranks of the context axis; their number divides L.

    Returns:
        `[R, 1, L / ranks, L]` bool: True for keys of the same sequence that are not later.
    """
    sequence = (position_ids == 0).cumsum(-1)
    positions = torch.arange(position_ids.shape[1], device=position_ids.device)
    own = own_part(positions, group, dim=0)
    same = own_part(sequence, group, dim=1)[:, :, None] == sequence[:, None, :]
    return (same & (positions <= own[:, None]))[:, None]


def own_part(values: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """This rank's consecutive part of a dimension along the tokens of a row."""
    return values.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def gathered_parts(part: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """The whole dimension from the parts of all ranks, without gradients."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim)


def sum_parts(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, each with values at some positions and 0 at the others."""
    total: Tensor = _SumParts.apply(values, group)  # type: ignore[no-untyped-call]
    return total


def whole_rows(part: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """The whole dimension from equal parts of all ranks; gradients add up over the ranks."""
    whole: Tensor = _WholeRows.apply(part, group, dim)  # type: ignore[no-untyped-call]
    return whole


class _SumParts(torch.autograd.Function):
    """Every rank gets each gradient; only the rank that computed the position uses it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gathered_parts(part, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        parts = gradients[0].chunk(dist.get_world_size(ctx.group), dim=ctx.dim)
        own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        # All parts concatenated.
        dist.reduce_scatter_single(own, torch.cat(parts), group=ctx.group)
        return own, None, None
