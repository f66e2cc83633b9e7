"""Splitting and gathering of rows over context ranks; forward and backward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def packed_causal_mask(last: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Causal mask of packed sequences, for this rank's queries and all keys of a row.

    Args:
        last: `[R, L]` last column whose token attends to each one, as `PackedRows` has it.
        group: The ranks of the context axis, whose number divides L; None for whole rows.

    Returns:
        `[R, 1, L / ranks, L]` bool: True for keys of the same sequence that are not later.
    """
    keys = torch.arange(last.shape[1], device=last.device)
    queries = (keys if group is None else own_part(keys, group, dim=0))[:, None]
    return ((keys <= queries) & (queries <= last[:, None, :]))[:, None]


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
