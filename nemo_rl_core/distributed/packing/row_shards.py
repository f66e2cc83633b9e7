"""Shards a batch over data-parallel ranks by its lengths, without reading remote tokens."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import numpy as np

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, Block, as_block
from nemo_rl_core.distributed.packing.ranks import sequence_flops

_NUM_BALANCED = 8
"""Number of items per share, the cheapest, that `assign` gives to the cheapest share one by one.

The more expensive items before them go to the shares in turns.
"""


def assign(costs: "np.ndarray[Any, Any]", num_shares: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Divides items into shares of nearly equal cost, mostly without a loop over items.

    The most expensive items go to the shares in turns, forward and then backward; the cheapest then
    go to the cheapest share (`share_out`).

    Example:
        >>> assign(np.array([9, 1, 8, 2]), 2)
        array([0, 0, 1, 1])
    """
    order = np.argsort(-costs, kind="stable")
    in_turns = max(len(order) - _NUM_BALANCED * num_shares, 0)
    turn, position = np.divmod(np.arange(in_turns), num_shares)
    owners = np.empty(len(order), np.int64)
    owners[order[:in_turns]] = np.where(turn % 2, num_shares - 1 - position, position)
    totals = np.bincount(owners[order[:in_turns]], costs[order[:in_turns]], minlength=num_shares)
    open_shares = list(zip(totals.tolist(), range(num_shares), strict=True))
    heapq.heapify(open_shares)
    cheapest = order[in_turns:]
    for item, cost in zip(cheapest.tolist(), costs[cheapest].tolist(), strict=True):
        total, share = open_shares[0]
        owners[item] = share
        heapq.heapreplace(open_shares, (total + cost, share))
    return owners


_NEARBY_RANKS = 8
"""Number of neighboring ranks, about one machine, that share consecutive rows."""


def assign_nearby(
    costs: "np.ndarray[Any, Any]", num_ranks: int
) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Same as `assign`, with consecutive items on neighboring ranks.

    The rows of one engine are consecutive, so a rank reads from few engines, most of them on its
    machine. Items are cut into runs of equal cost, each for 8 ranks.
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
        owners[start:end] = first + assign(costs[start:end], size)
    return owners


@dataclass(frozen=True, eq=False)
class BlockParts(Sequence[Block]):
    """Consecutive parts of a block, one per worker, which neighboring workers share.

    Example:
        >>> parts = BlockParts({"x": np.array([4, 5, 6])}, np.array([1, 3]))
        >>> [part["x"].tolist() for part in parts]
        [[4], [5, 6]]
    """

    block: Block
    ends: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"part {index} of {len(self)}")
        start = int(self.ends[index - 1]) if index else 0
        end = int(self.ends[index])
        return {name: column[start:end] for name, column in self.block.items()}


@dataclass(frozen=True, eq=False)
class ShardedRows:
    """Rows of a batch, sharded over ranks.

    Attributes:
        parts: Blocks of rows that neighboring ranks share, in rank order.
        order: `[B]` int, index in the batch of each row, one rank after the other.
    """

    parts: Sequence[Sequence[Block]]
    order: "np.ndarray[Any, np.dtype[np.int64]]"
    sizes: "np.ndarray[Any, np.dtype[np.int64]]"


def shard_rows(batch: BatchedDataDict, *, num_ranks: int, keep_groups: bool = False) -> ShardedRows:
    """Shards rows over data-parallel ranks by cost; each rank plans its micro-batches.

    Reads only lengths, and loops over few rows. `shard_for_training` plans better if a rank has few
    micro-batches: here, a rank with fewer micro-batches adds empty ones.

    Args:
        batch: Batch with `input_lengths [B]`, and `group_ids [B]` if groups are kept.
        keep_groups: Whether rows of a group, which share a prefix, stay on one rank.

    Returns:
        The rows of each rank, in the order of the batch. Neighboring ranks read one block.
    """
    owners = _owners(batch, num_ranks, keep_groups).astype(np.min_scalar_type(num_ranks))
    order = np.argsort(owners, kind="stable")  # 16-bit integers use a radix sort
    sizes = np.bincount(owners, minlength=num_ranks)
    ends = np.cumsum(sizes)
    # As arrays, since slicing and sending many parts is faster than with tensors.
    ordered = BatchedDataDict(as_block(batch.select_indices(order).data))
    parts = []
    for first in range(0, num_ranks, _NEARBY_RANKS):
        start, rank_ends = int(ends[first] - sizes[first]), ends[first : first + _NEARBY_RANKS]
        parts.append(BlockParts(ordered.slice(start, int(rank_ends[-1])).data, rank_ends - start))
    return ShardedRows(parts, order, sizes)


def _owners(batch: BatchedDataDict, num_ranks: int, keep_groups: bool) -> Any:
    costs = cast("Any", sequence_flops)(batch["input_lengths"].numpy())  # elementwise
    if not keep_groups:
        return assign_nearby(costs, num_ranks)
    _, first, unit = np.unique(batch["group_ids"].numpy(), return_index=True, return_inverse=True)
    group = np.argsort(np.argsort(first))[unit]  # of each row, numbered in the batch's order
    return assign_nearby(np.bincount(group, costs), num_ranks)[group]
