"""Shards a batch over data-parallel ranks, with the same number of micro-batches of balanced cost.

Ranks synchronize in every micro-batch (sharded weights are gathered, experts exchange tokens), so
each must run the same number, and the most expensive rank determines the duration. The cost of a
sequence has a linear part and a quadratic part from attention. `Shards.restored` restores the order
of results.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import (
    NO_SEQUENCES,
    Microbatch,
    bundled,
    longest_first,
    plan_microbatches,
)
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing, expand_trees, prefix_trees


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder that determine its cost.

    Attributes:
        hidden_size: `D`, width of the residual stream.
        intermediate_size: Width of the feed-forward; in a mixture, of a token's active experts.
        vocab_size: `V`, number of logits per token.
        attention_size: Query heads times head size.
        key_value_size: Key (and value) heads times head size.
    """

    hidden_size: int
    num_layers: int
    intermediate_size: int
    vocab_size: int
    attention_size: int
    key_value_size: int


TYPICAL_SHAPE = ModelShape(
    hidden_size=2048,
    num_layers=32,
    intermediate_size=8192,
    vocab_size=128_000,
    attention_size=2048,
    key_value_size=512,
)
"""Default shape: a model of about 2 billion parameters.

Only the ratio of the two terms affects the balance: here they are equal at 33,696 tokens.
"""


def sequence_flops(length: int, shape: ModelShape = TYPICAL_SHAPE) -> int:
    """Returns the FLOPs of a forward and backward pass over one sequence.

    A matrix product takes two operations per weight and token. A layer's weights are queries and
    output (`D * A` each), keys and values (`D * K` each) and a gated feed-forward (`3 * D * F`);
    the head has `D * V`. Causal attention multiplies `T * T / 2` pairs by `A`, once for scores and
    once for values. The backward pass takes twice the forward pass. Norms, activations and the
    embedding are not counted.

    `3 * (2 * T * (L * (2*D*A + 2*D*K + 3*D*F) + D*V) + L * 2 * A * T**2)`

    This is three times equation 2.2 of Kaplan et al. (2020), arXiv:2001.08361, for a sequence
    instead of a token, plus the head, which they do not count.

    Returns:
        An integer, so that sums of costs are exact and plans deterministic.

    Example:
        >>> tiny = ModelShape(2, 1, 4, 8, 2, 1)
        >>> sequence_flops(1, tiny), sequence_flops(2, tiny)
        (324, 672)
    """
    layer = shape.hidden_size * (
        2 * shape.attention_size + 2 * shape.key_value_size + 3 * shape.intermediate_size
    )
    weights = shape.num_layers * layer + shape.hidden_size * shape.vocab_size
    attention = shape.num_layers * 2 * shape.attention_size * length**2
    return 3 * (2 * length * weights + attention)


def plan_for_ranks(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    bundles: Sequence[int] | None = None,
    share_rows: bool = True,
    cost: Callable[[int], int] = sequence_flops,
) -> list[list[Microbatch]]:
    """Distributes sequences over ranks, and on each over micro-batches of at most `max_tokens`.

    Chooses the cheaper of two plans. Packing all sequences and distributing the micro-batches
    wastes least on padding. Distributing the sequences and packing on each rank is more balanced
    with few micro-batches per rank, or if the last one is nearly empty.

    Args:
        bundles: Bundle id of each sequence; sequences of a bundle go into the same micro-batch.

    Returns:
        The micro-batches of each rank, the same number on all ranks, the most expensive first. A
        rank with too few sequences gets `NO_SEQUENCES`.

    Example:
        >>> plans = plan_for_ranks([4, 3, 2, 1], num_ranks=2, max_tokens=8)
        >>> [[part.rows for part in plan] for plan in plans]
        [[((0,), (1, 3))], [((2,),)]]
    """
    if num_ranks == 1:
        return [
            plan_microbatches(
                lengths, max_tokens=max_tokens, bundles=bundles, share_rows=share_rows
            )
        ]
    planner = _Planner(lengths, max_tokens, bundles, share_rows, cost)
    options = (planner.packed_then_shared(num_ranks), planner.shared_then_packed(num_ranks))
    return min(options, key=planner.step_cost)


def share_out(
    costs: Sequence[int], num_shares: int, *, max_items: int | None = None
) -> list[list[int]]:
    """Divides items into shares of nearly equal cost: each item goes to the cheapest share.

    Items are taken in order of descending cost. Without `max_items`, the largest share costs at
    most 4/3 of the optimum: Graham (1969), "Bounds on multiprocessing timing anomalies".

    Example:
        >>> share_out([5, 4, 3, 3, 3], 2)
        [[0, 3], [1, 2, 4]]
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    open_shares = [(0, share) for share in range(num_shares)]
    for item in longest_first(costs):
        total, share = open_shares[0]
        shares[share].append(item)
        if len(shares[share]) != max_items:
            heapq.heapreplace(open_shares, (total + costs[item], share))
        else:
            heapq.heappop(open_shares)
    return shares


class _Planner:
    """Sequences, and the operations of planning on them."""

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        bundles: Sequence[int] | None,
        share_rows: bool,
        cost: Callable[[int], int],
    ) -> None:
        self._lengths, self._bundles = lengths, bundles
        self._max_tokens, self._share_rows = max_tokens, share_rows
        self._cost_of_length = lru_cache(maxsize=None)(cost)  # few lengths, many sequences
        self._units = bundled(longest_first(lengths), bundles)
        self._unit_of = {index: number for number, unit in enumerate(self._units) for index in unit}

    def plan(self, indices: Iterable[int]) -> list[Microbatch]:
        chosen = sorted(indices)
        parts = plan_microbatches(
            [self._lengths[index] for index in chosen],
            max_tokens=self._max_tokens,
            bundles=None if self._bundles is None else [self._bundles[index] for index in chosen],
            share_rows=self._share_rows,
        )
        return [part.renumbered(chosen) for part in parts]

    def packed_then_shared(self, num_ranks: int) -> list[list[Microbatch]]:
        packed = _Splittable(self, self.plan(range(len(self._lengths))))
        while len(packed) % num_ranks:
            packed.lengthen()
        parts = packed.parts
        costs = [self.cost(part) for part in parts]
        shares = share_out(costs, num_ranks, max_items=len(parts) // num_ranks)
        return [[parts[number] for number in share] for share in shares]

    def shared_then_packed(self, num_ranks: int) -> list[list[Microbatch]]:
        costs = [self._cost_of_unit(unit) for unit in self._units]
        plans = [
            _Splittable(self, self.plan(index for unit in share for index in self._units[unit]))
            for share in share_out(costs, num_ranks)
        ]
        most = max(map(len, plans))
        shortest = [(len(plan), rank) for rank, plan in enumerate(plans)]
        heapq.heapify(shortest)
        while shortest[0][0] < most:
            rank = shortest[0][1]
            plans[rank].lengthen()
            heapq.heapreplace(shortest, (len(plans[rank]), rank))
            most = max(most, len(plans[rank]))
        return [sorted(plan.parts, key=self.cost, reverse=True) for plan in plans]

    def step_cost(self, plans: Sequence[Sequence[Microbatch]]) -> int:
        """Returns the cost of a step in which ranks synchronize in every micro-batch."""
        costs = ([self.cost(part) for part in plan] for plan in plans)
        return sum(map(max, zip(*costs, strict=True)))

    def cost(self, part: Microbatch) -> int:
        return len(part.rows) * self._cost_of_length(part.row_length)

    def halves(self, part: Microbatch) -> list[Microbatch]:
        """Splits a micro-batch in two; empty if its sequences belong together."""
        units = sorted({self._unit_of[index] for index in part.indices})
        if len(units) < 2:
            return []
        # Separates long from short sequences, so that the second half can have shorter rows.
        so_far = list(accumulate(self._cost_of_unit(self._units[unit]) for unit in units))
        middle = min(bisect_left(so_far, so_far[-1] / 2) + 1, len(units) - 1)
        return [
            part
            for half in (units[:middle], units[middle:])
            for part in self.plan(index for unit in half for index in self._units[unit])
        ]

    def _cost_of_unit(self, unit: Sequence[int]) -> int:
        return sum(self._cost_of_length(self._lengths[index]) for index in unit)


class _Splittable:
    """Micro-batches whose number can be increased by splitting the most expensive ones."""

    def __init__(self, planner: _Planner, parts: Sequence[Microbatch]) -> None:
        self._planner = planner
        self._parts = dict(enumerate(parts))  # by number, in order of creation
        self._num_made = len(parts)
        self._costliest = [(-planner.cost(part), number) for number, part in self._parts.items()]
        heapq.heapify(self._costliest)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def parts(self) -> list[Microbatch]:
        return list(self._parts.values())

    def lengthen(self) -> None:
        """Splits the most expensive micro-batch that can be split, or adds an empty one."""
        while self._costliest:
            _, number = heapq.heappop(self._costliest)
            if halves := self._planner.halves(self._parts[number]):
                del self._parts[number]
                for half in halves:
                    heapq.heappush(self._costliest, (-self._planner.cost(half), self._num_made))
                    self._add(half)
                return
        self._add(NO_SEQUENCES)

    def _add(self, part: Microbatch) -> None:
        self._parts[self._num_made] = part
        self._num_made += 1


@dataclass(frozen=True)
class Shards:
    """The shards of a batch, one per rank; a sequence of batches.

    Attributes:
        batches: The rows of each rank; a planned batch has `microbatches`.
        indices: Index in the full batch of each row, for each rank.

    Example:
        >>> import torch
        >>> batch = BatchedDataDict({"input_lengths": torch.tensor([4, 3, 2, 1])})
        >>> shards = shard_for_training(batch, num_ranks=2, max_tokens=8)
        >>> shards.indices
        ((0, 1, 3), (2,))
        >>> doubled = [BatchedDataDict({"x": 2 * shard["input_lengths"]}) for shard in shards]
        >>> shards.restored(doubled)["x"].tolist()
        [8, 6, 4, 2]
    """

    batches: tuple[BatchedDataDict, ...]
    indices: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[BatchedDataDict]:
        return iter(self.batches)

    def __getitem__(self, rank: int) -> BatchedDataDict:
        return self.batches[rank]

    @property
    def order(self) -> list[int]:
        """Concatenated `indices` of all ranks, which `reorder_data` inverts."""
        return [index for indices in self.indices for index in indices]

    def restored(self, results: Sequence[BatchedDataDict]) -> BatchedDataDict:
        """Joins the results of ranks in the order of the full batch."""
        return type(results[0]).from_batches(results).reorder_data(self.order)


def plan_shard(
    batch: BatchedDataDict,
    *,
    max_tokens: int,
    share_rows: bool = True,
    sharing: PrefixSharing | None = None,
) -> list[Microbatch]:
    """Plans the micro-batches of one rank's rows; see `plan_microbatches` and `prefix_trees`.

    Args:
        batch: Batch with `input_ids [B, T]`, `input_lengths [B]`, and `pair_ids [B]` if rows belong
            together; B may be 0.
    """
    return _plans(batch, 1, max_tokens, share_rows, sharing)[0]


def shard_for_training(
    batch: BatchedDataDict,
    *,
    num_ranks: int,
    max_tokens: int,
    share_rows: bool = True,
    sharing: PrefixSharing | None = None,
) -> Shards:
    """Shards rows over data-parallel ranks and plans micro-batches; see `plan_for_ranks`.

    All ranks have the same number of micro-batches and nearly the same work; a rank with too few
    rows has fewer, and its backend adds empty ones. Rows with equal `pair_ids` stay in one
    micro-batch. With one rank, the shard is the unchanged batch.

    Args:
        batch: Batch with `input_lengths [B]`, `pair_ids [B]` if rows belong together, and
            `input_ids [B, T]` if prefixes are shared.

    Returns:
        One shard per rank. Its rows are in the order of the batch, and the indices in its
        `microbatches` count within the shard.
    """
    options = [_plans(batch, num_ranks, max_tokens, share_rows, None)]
    if sharing is not None and share_rows:
        # Fewer and longer units can be harder to divide.
        options.append(_plans(batch, num_ranks, max_tokens, share_rows, sharing))
    return _planned(batch, min(options, key=_step_cost))


def _plans(
    batch: BatchedDataDict,
    num_ranks: int,
    max_tokens: int,
    share_rows: bool,
    sharing: PrefixSharing | None,
) -> list[list[Microbatch]]:
    lengths = batch["input_lengths"]
    bundles = batch["pair_ids"].tolist() if "pair_ids" in batch else None
    plan = partial(
        plan_for_ranks, num_ranks=num_ranks, max_tokens=max_tokens, share_rows=share_rows
    )
    if sharing is None or not share_rows:
        return plan(lengths.tolist(), bundles=bundles)
    trees = prefix_trees(
        batch["input_ids"],
        lengths,
        sharing=sharing,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        bundles=bundles,
    )
    plans = plan(
        [tree.num_tokens for tree in trees],
        bundles=None if bundles is None else [bundles[tree.indices[0]] for tree in trees],
    )
    return [
        [part if part == NO_SEQUENCES else expand_trees(part, trees) for part in parts]
        for parts in plans
    ]


def _step_cost(plans: Sequence[Sequence[Microbatch]]) -> int:
    """Returns the cost of a step in which ranks synchronize in every micro-batch."""
    costs = ([len(part.rows) * sequence_flops(part.row_length) for part in plan] for plan in plans)
    return sum(map(max, zip(*costs, strict=True)))


def _planned(batch: BatchedDataDict, plans: Sequence[Sequence[Microbatch]]) -> Shards:
    indices = tuple(tuple(sorted(i for part in plan for i in part.indices)) for plan in plans)
    batches = []
    for rows, plan in zip(indices, plans, strict=True):
        shard = batch.select_indices(rows)
        number_of = {row: number for number, row in enumerate(rows)}
        # The backend adds empty micro-batches: it knows the shape of filler for its model, and
        # compares the number of micro-batches of all ranks anyway.
        shard.microbatches = [part.renumbered(number_of) for part in plan if part != NO_SEQUENCES]
        batches.append(shard)
    return Shards(tuple(batches), indices)
