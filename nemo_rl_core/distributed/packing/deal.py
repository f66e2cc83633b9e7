"""A batch dealt out to data-parallel ranks by lengths alone, where its tokens lie elsewhere."""

import heapq
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.held_rows import BlockParts, as_block
from nemo_rl_core.distributed.packing.ranks import sequence_flops

_NUM_EVENED_OUT = 8
"""Of a share's items, how many of the cheapest go where least is; the others are dealt in turns."""


def deal(costs: "np.ndarray[Any, Any]", num_shares: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Divides items into shares of nearly equal cost, without a look at each of many.

    The costliest are dealt to and fro, to the first share, ..., to the last, to the last, ..., to
    the first; the cheapest then go where least is (`share_out`).

    Args:
        costs: `[n]`, of each item.
        num_shares: How many shares.

    Returns:
        `[n]`, the share of each item.

    Example:
        >>> deal(np.array([9, 1, 8, 2]), 2)
        array([0, 0, 1, 1])
    """
    order = np.argsort(-costs, kind="stable")
    in_turns = max(len(order) - _NUM_EVENED_OUT * num_shares, 0)
    turn, place = np.divmod(np.arange(in_turns), num_shares)
    owners = np.empty(len(order), np.int64)
    owners[order[:in_turns]] = np.where(turn % 2, num_shares - 1 - place, place)
    dealt = np.bincount(owners[order[:in_turns]], costs[order[:in_turns]], minlength=num_shares)
    open_shares = list(zip(dealt.tolist(), range(num_shares), strict=True))
    heapq.heapify(open_shares)
    left = order[in_turns:]
    for item, cost in zip(left.tolist(), costs[left].tolist(), strict=True):
        total, share = open_shares[0]
        owners[item] = share
        heapq.heapreplace(open_shares, (total + cost, share))
    return owners


_NEARBY_RANKS = 8
"""So many ranks, about those of a machine, share rows that lie together."""


def deal_nearby(
    costs: "np.ndarray[Any, Any]", num_ranks: int
) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """As `deal`, with consecutive items on neighbouring ranks.

    Rows that one engine has made are consecutive, so that a rank reads those of few engines, most
    of them on its own machine. Items are cut into runs of equal cost, one for 8 ranks each.

    Args:
        costs: `[n]`, of each item.
        num_ranks: How many ranks.

    Returns:
        `[n]`, the rank of each item.
    """
    firsts = np.arange(0, num_ranks, _NEARBY_RANKS)
    sizes = np.diff(firsts, append=num_ranks)
    ends = np.cumsum(sizes) / num_ranks * costs.sum()
    run = np.minimum(np.searchsorted(ends, np.cumsum(costs) - costs / 2), len(firsts) - 1)
    cuts = np.searchsorted(run, np.arange(len(firsts) + 1))
    owners = np.empty(len(costs), np.int64)
    for first, size, start, end in zip(
        firsts.tolist(), sizes.tolist(), cuts[:-1].tolist(), cuts[1:].tolist(), strict=True
    ):
        owners[start:end] = first + deal(costs[start:end], size)
    return owners


@dataclass(frozen=True, eq=False)
class DealtRows:
    """Rows of a batch, dealt out to ranks.

    Attributes:
        parts: What the ranks read, as they share it: a part a rank, in rank order.
        order: `[B]` int, of one rank after the other: which row of the batch each row was.
        sizes: `[R]` int, the rows of each rank.
    """

    parts: list[BlockParts]
    order: "np.ndarray[Any, np.dtype[np.int64]]"
    sizes: "np.ndarray[Any, np.dtype[np.int64]]"


def deal_rows(batch: BatchedDataDict, *, num_ranks: int, keep_groups: bool = False) -> DealtRows:
    """Gives each data-parallel rank rows of nearly equal cost; ranks plan their micro-batches.

    Reads lengths alone, and looks at few rows one by one. `shard_for_training` has the better plan
    where a rank has few micro-batches: here, one that has fewer fills up with empty ones.

    Args:
        batch: With `input_lengths [B]`, and `group_ids [B]` where groups are kept.
        num_ranks: Data-parallel ranks. Those past the rows get a part without rows.
        keep_groups: Whether rows of a group, which begin alike, stay on one rank.

    Returns:
        The rows of each rank, in the order of the batch. Ranks that lie together read one block.
    """
    if num_ranks == 1:
        size = np.array([batch.size])
        return DealtRows([BlockParts(as_block(batch.data), size)], np.arange(batch.size), size)
    owners = _owners(batch, num_ranks, keep_groups).astype(np.min_scalar_type(num_ranks))
    order = np.argsort(owners, kind="stable")  # of few different ones: 16 bits are sorted by radix
    sizes = np.bincount(owners, minlength=num_ranks)
    ends = np.cumsum(sizes)
    # As arrays, of which many parts are made and sent in less time than of tensors.
    ordered = BatchedDataDict(as_block(batch.select_indices(order).data))
    parts = []
    for first in range(0, num_ranks, _NEARBY_RANKS):
        start, inner = int(ends[first] - sizes[first]), ends[first : first + _NEARBY_RANKS]
        parts.append(BlockParts(ordered.slice(start, int(inner[-1])).data, inner - start))
    return DealtRows(parts, order, sizes)


def _owners(batch: BatchedDataDict, num_ranks: int, keep_groups: bool) -> Any:
    costs = cast("Any", sequence_flops)(batch["input_lengths"].numpy())  # of each element
    if not keep_groups:
        return deal_nearby(costs, num_ranks)
    _, first, unit = np.unique(batch["group_ids"].numpy(), return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))[unit]  # of each row's group, in the batch's order
    return deal_nearby(np.bincount(place, costs), num_ranks)[place]
