"""Micro-batches for data-parallel ranks: equally many on each, and balanced by what they cost.

Ranks meet in every micro-batch (sharded weights are gathered, experts exchange tokens), so each
must run the same number, and in each the costliest decides.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from nemo_rl_core.distributed.packing.flops import sequence_flops
from nemo_rl_core.distributed.packing.plan import (
    NO_SEQUENCES,
    Microbatch,
    bundled,
    longest_first,
    plan_microbatches,
)


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

    Of two ways the cheaper step is taken. To pack all sequences and share out the micro-batches
    wastes least on padding; to share out the sequences and pack on each rank is more even where
    there are few micro-batches a rank, or the last is nearly empty.

    Args:
        lengths: Tokens of each sequence, at least 1.
        num_ranks: Data-parallel ranks; with one, the plan is that of `plan_microbatches`.
        max_tokens: The budget of one micro-batch: rows times row length.
        bundles: For each sequence an id; sequences of one id go into the same micro-batch.
        share_rows: Whether a row may hold several sequences.
        cost: What a sequence of this length costs.

    Returns:
        For each rank its micro-batches, equally many on all, the costliest first. Where a rank has
        too few sequences, `NO_SEQUENCES` stands for the ones it lacks.

    Raises:
        DataError: If one sequence, or one bundle, alone is more than the budget.

    Example:
        >>> plans = plan_for_ranks([4, 3, 2, 1], num_ranks=2, max_tokens=8)
        >>> [[part.rows for part in plan] for plan in plans]
        [[((0,), (1, 3))], [((2,),)]]
    """
    work = _Work(lengths, max_tokens, bundles, share_rows, cost)
    if num_ranks == 1:
        return [work.plan(range(len(lengths)))]
    ways = (work.packed_then_shared(num_ranks), work.shared_then_packed(num_ranks))
    return min(ways, key=work.step_cost)


def share_out(
    costs: Sequence[int], num_shares: int, *, max_items: int | None = None
) -> list[list[int]]:
    """Divides items into shares of nearly equal cost: the costliest first, where least is yet.

    No share costs more than 4/3 of the best division's largest, without `max_items`: Graham (1969),
    "Bounds on multiprocessing timing anomalies".

    Args:
        costs: Of each item.
        num_shares: How many shares; some are empty where items are fewer.
        max_items: The most items that one share may have.

    Returns:
        The items of each share, the costliest first.

    Example:
        >>> share_out([5, 4, 3, 3, 3], 2)
        [[0, 3], [1, 2, 4]]
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    open_shares = [(0, share) for share in range(num_shares)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        total, share = heapq.heappop(open_shares)
        shares[share].append(item)
        if len(shares[share]) != max_items:
            heapq.heappush(open_shares, (total + costs[item], share))
    return shares


class _Work:
    """Sequences, what may be done with them, and what it costs."""

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
        self._cost_of_length = cost
        self._units = bundled(longest_first(lengths), bundles)
        self._unit_of = {index: number for number, unit in enumerate(self._units) for index in unit}

    def plan(self, indices: Iterable[int]) -> list[Microbatch]:
        """Micro-batches of some of the sequences, for one rank."""
        chosen = sorted(indices)
        parts = plan_microbatches(
            [self._lengths[index] for index in chosen],
            max_tokens=self._max_tokens,
            bundles=None if self._bundles is None else [self._bundles[index] for index in chosen],
            share_rows=self._share_rows,
        )
        return [part.renumbered(chosen) for part in parts]

    def packed_then_shared(self, num_ranks: int) -> list[list[Microbatch]]:
        """Micro-batches of all sequences, dealt out."""
        parts = self.plan(range(len(self._lengths)))
        while len(parts) % num_ranks:
            self._lengthen(parts)
        costs = [self._cost(part) for part in parts]
        shares = share_out(costs, num_ranks, max_items=len(parts) // num_ranks)
        return [[parts[place] for place in share] for share in shares]

    def shared_then_packed(self, num_ranks: int) -> list[list[Microbatch]]:
        """A share of the sequences for each rank, and its micro-batches."""
        costs = [self._cost_of_unit(unit) for unit in self._units]
        plans = [
            self.plan(index for place in share for index in self._units[place])
            for share in share_out(costs, num_ranks)
        ]
        while len(shortest := min(plans, key=len)) < max(len(plan) for plan in plans):
            self._lengthen(shortest)
        return [sorted(plan, key=self._cost, reverse=True) for plan in plans]

    def step_cost(self, plans: Sequence[Sequence[Microbatch]]) -> int:
        """What a step takes where ranks wait for each other in every micro-batch."""
        return sum(max(map(self._cost, parts)) for parts in zip(*plans, strict=True))

    def _cost(self, part: Microbatch) -> int:
        return len(part.rows) * self._cost_of_length(part.row_length)

    def _cost_of_unit(self, unit: Sequence[int]) -> int:
        return sum(self._cost_of_length(self._lengths[index]) for index in unit)

    def _lengthen(self, plan: list[Microbatch]) -> None:
        """Splits the costliest micro-batch that can be split, or adds an empty one."""
        by_cost = sorted(range(len(plan)), key=lambda place: -self._cost(plan[place]))
        for place in by_cost:
            units = sorted({self._unit_of[index] for index in plan[place].indices})
            if len(units) > 1:
                break
        else:
            plan.append(NO_SEQUENCES)
            return
        del plan[place]
        # Long ones apart from short ones, so that rows of the second half can be shorter.
        so_far = list(accumulate(self._cost_of_unit(self._units[unit]) for unit in units))
        middle = min(bisect_left(so_far, so_far[-1] / 2) + 1, len(units) - 1)
        for half in (units[:middle], units[middle:]):
            plan += self.plan(index for unit in half for index in self._units[unit])
