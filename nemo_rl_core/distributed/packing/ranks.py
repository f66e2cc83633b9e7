"""Micro-batches for data-parallel ranks: equally many on each, and balanced by what they cost.

Ranks meet in every micro-batch (sharded weights are gathered, experts exchange tokens), so each
must run the same number, and the slowest one decides. Sequences are shared out by cost first, the
costliest first to the rank with least (Graham 1969), so that all ranks get a like mix of lengths;
then each rank's share is packed for itself. The k-th micro-batches of all ranks are alike, then.
"""

import heapq
from collections.abc import Callable, Sequence

from nemo_rl_core.distributed.packing.flops import sequence_flops
from nemo_rl_core.distributed.packing.microbatches import (
    NO_SEQUENCES,
    Microbatch,
    bundled,
    longest_first,
    plan_microbatches,
)

Planner = Callable[[Sequence[int]], list[Microbatch]]


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
        [[((0,), (3,))], [((1,), (2,))]]
    """

    def plan(indices: Sequence[int]) -> list[Microbatch]:
        parts = plan_microbatches(
            [lengths[index] for index in indices],
            max_tokens=max_tokens,
            bundles=None if bundles is None else [bundles[index] for index in indices],
            share_rows=share_rows,
        )
        return [part.renumbered(indices) for part in parts]

    if num_ranks == 1:
        return [plan(range(len(lengths)))]
    costs = [cost(length) for length in lengths]
    units = bundled(longest_first(lengths), bundles)
    shares = share_out([sum(costs[index] for index in unit) for unit in units], num_ranks)
    plans = [plan(sorted(index for unit in share for index in units[unit])) for share in shares]
    unit_of = {index: number for number, unit in enumerate(units) for index in unit}
    while len(shortest := min(plans, key=len)) < max(len(plan) for plan in plans):
        _lengthen(shortest, costs, unit_of, plan)
    for ranks_plan in plans:
        ranks_plan.sort(key=lambda part: -sum(costs[index] for index in part.indices))
    return plans


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


def _lengthen(
    plan: list[Microbatch], costs: Sequence[int], unit_of: dict[int, int], plan_part: Planner
) -> None:
    """Splits the costliest micro-batch that can be split, or adds an empty one."""
    divisible = [
        (sum(costs[index] for index in part.indices), -place)
        for place, part in enumerate(plan)
        if len({unit_of[index] for index in part.indices}) > 1
    ]
    if not divisible:
        plan.append(NO_SEQUENCES)
        return
    total, place = max(divisible)
    # Long ones apart from short ones, so that rows of the second half can be shorter.
    units: dict[int, list[int]] = {}
    for index in plan.pop(-place).indices:
        units.setdefault(unit_of[index], []).append(index)
    ordered = [units[number] for number in sorted(units)]
    long = [ordered.pop(0)]
    while len(ordered) > 1 and 2 * sum(costs[index] for unit in long for index in unit) < total:
        long.append(ordered.pop(0))
    for half in (long, ordered):
        plan += plan_part(sorted(index for unit in half for index in unit))
