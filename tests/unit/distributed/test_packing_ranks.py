"""Plans for data-parallel ranks: equally many micro-batches, nothing lost, balanced."""

import random
from itertools import zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.distributed.packing.plan import (
    NO_SEQUENCES,
    Microbatch,
    plan_microbatches,
)
from nemo_rl_core.distributed.packing.ranks import (
    TYPICAL_SHAPE,
    ModelShape,
    plan_for_ranks,
    sequence_flops,
    share_out,
)
from nemo_rl_core.errors import DataError

LENGTHS = st.lists(st.integers(1, 40), max_size=60)
NUM_RANKS = st.integers(1, 9)


@st.composite
def bundled(draw: st.DrawFn) -> tuple[list[int], list[int] | None, int]:
    """Draws lengths, ids of bundles of at most three or none, and a budget for every bundle."""
    members = draw(st.lists(st.integers(1, 3), max_size=20))
    ids = draw(st.permutations([7 * bundle for bundle, n in enumerate(members) for _ in range(n)]))
    lengths = draw(st.lists(st.integers(1, 40), min_size=len(ids), max_size=len(ids)))
    return lengths, ids if draw(st.booleans()) else None, draw(st.integers(120, 300))


def all_indices(plans: list[list[Microbatch]]) -> list[int]:
    return sorted(index for plan in plans for part in plan for index in part.indices)


@settings(deadline=None)
@given(bundled(), NUM_RANKS, st.booleans())
def test_ranks_run_equally_many_microbatches_within_the_budget(
    drawn: tuple[list[int], list[int] | None, int], num_ranks: int, share_rows: bool
) -> None:
    lengths, bundles, budget = drawn
    plans = plan_for_ranks(
        lengths, num_ranks=num_ranks, max_tokens=budget, bundles=bundles, share_rows=share_rows
    )
    assert len(plans) == num_ranks
    assert len({len(plan) for plan in plans}) == 1
    assert all_indices(plans) == list(range(len(lengths)))
    for part in (part for plan in plans for part in plan if part != NO_SEQUENCES):
        assert len(part.rows) * part.row_length <= budget
        assert part.row_length == max(lengths[index] for index in part.indices)
        assert all(0 < sum(lengths[index] for index in row) <= part.row_length for row in part.rows)
        assert share_rows or all(len(row) == 1 for row in part.rows)
    if bundles is not None:
        homes = [{bundles[index] for index in part.indices} for plan in plans for part in plan]
        assert sum(len(home) for home in homes) == len(set(bundles))


@settings(deadline=None)
@given(LENGTHS, NUM_RANKS)
def test_rank_is_idle_only_with_too_few_sequences(lengths: list[int], num_ranks: int) -> None:
    for plan in plan_for_ranks(lengths, num_ranks=num_ranks, max_tokens=60):
        if NO_SEQUENCES in plan:
            assert all(len(part.indices) <= 1 for part in plan)


@settings(deadline=None)
@given(bundled(), st.booleans())
def test_one_rank_has_the_plan_of_one(
    drawn: tuple[list[int], list[int] | None, int], share_rows: bool
) -> None:
    lengths, bundles, budget = drawn
    single = plan_microbatches(lengths, max_tokens=budget, bundles=bundles, share_rows=share_rows)
    assert [single] == plan_for_ranks(
        lengths, num_ranks=1, max_tokens=budget, bundles=bundles, share_rows=share_rows
    )


@settings(deadline=None)
@given(LENGTHS, NUM_RANKS)
def test_plan_depends_only_on_lengths(lengths: list[int], num_ranks: int) -> None:
    first, second = (
        plan_for_ranks(tuple(lengths), num_ranks=num_ranks, max_tokens=60) for _ in range(2)
    )
    assert first == second


def test_two_ranks_by_hand() -> None:
    # By length, so that costs order alike: 4 to rank 0; 3 to rank 1; 3 to rank 1 would be more than
    # rank 0 with it, and both have a 3 then: rank 0 has 4, rank 1 has 3 + 3; 2 goes to rank 0.
    # Budget 4: rank 0 computes [4], [2]; rank 1 [3], [3].
    plans = plan_for_ranks([3, 4, 2, 3], num_ranks=2, max_tokens=4, cost=lambda length: length)
    assert plans == [
        [Microbatch(((1,),), 4), Microbatch(((2,),), 2)],
        [Microbatch(((0,),), 3), Microbatch(((3,),), 3)],
    ]


def test_microbatches_are_distributed_if_that_is_cheaper() -> None:
    # Cost is the square. Budget 6 makes [6], [3, 3] and [3, 3] of all: a multiple of two after one
    # of the pairs is split. 36 to rank 0; 18, then 9 to rank 1, which is full; 9 to rank 0. The
    # step costs 36 + 9. To share out first would leave rank 1 with twice two of 3: 36 + 18.
    plans = plan_for_ranks([6, 3, 3, 3, 3], num_ranks=2, max_tokens=6, cost=lambda n: n * n)
    assert plans[0] == [Microbatch(((0,),), 6), Microbatch(((2,),), 3)]
    assert plans[1] == [Microbatch(((3,), (4,)), 3), Microbatch(((1,),), 3)]


def test_sequences_are_distributed_first_if_that_is_cheaper() -> None:
    # 16 to rank 0; 9, 4 and 4 to rank 1, and the last 4 to rank 0. Under a budget of 8, rank 1 has
    # two rows of 3 and a 2 left over; rank 0, whose two rows of 4 would do, computes them apart.
    # The step costs 18 + 4, against 32 of two rows of 4 on one rank and three of 2 on the other.
    plans = plan_for_ranks([4, 3, 2, 2, 2], num_ranks=2, max_tokens=8, cost=lambda n: n * n)
    assert plans[0] == [Microbatch(((0,),), 4), Microbatch(((4,),), 2)]
    assert plans[1] == [Microbatch(((1,), (2,)), 3), Microbatch(((3,),), 2)]


def test_a_rank_without_sequences_has_empty_microbatches() -> None:
    plans = plan_for_ranks([5, 4, 3], num_ranks=2, max_tokens=5)
    assert plans == [
        [Microbatch(((0,),), 5), NO_SEQUENCES],
        [Microbatch(((1,),), 4), Microbatch(((2,),), 3)],
    ]
    assert plan_for_ranks([], num_ranks=2, max_tokens=5) == [[], []]


def test_most_expensive_item_goes_to_the_cheapest_share() -> None:
    # 7 | 6; 5 joins 6 (11); 4 joins 7 (11); 3 goes to the first of equals (14).
    assert share_out([3, 4, 5, 6, 7], 2) == [[4, 1, 0], [3, 2]]
    # At most two in a share: the third must take 3.
    assert share_out([3, 4, 5, 6, 7], 3, max_items=2) == [[4], [3, 0], [2, 1]]
    assert share_out([1], 3) == [[0], [], []]


@pytest.mark.parametrize("share_rows", [True, False])
def test_a_step_over_a_long_tail_is_nearly_even(share_rows: bool) -> None:
    generator = random.Random(0)
    lengths = [min(8192, 16 + int(generator.lognormvariate(6, 1))) for _ in range(1024)]

    def step_cost(plans: list[list[Microbatch]]) -> int:
        costs = [[len(part.rows) * sequence_flops(part.row_length) for part in p] for p in plans]
        return sum(max(parts) for parts in zip_longest(*costs, fillvalue=0))

    even = sum(map(sequence_flops, lengths)) / 8
    plans = plan_for_ranks(lengths, num_ranks=8, max_tokens=16_384, share_rows=share_rows)
    assert step_cost(plans) < 1.13 * even
    # Contiguous shards of the same rows, each planned for itself, take longer.
    unsplit = [
        plan_microbatches(lengths[at : at + 128], max_tokens=16_384, share_rows=share_rows)
        for at in range(0, 1024, 128)
    ]
    assert step_cost(unsplit) > 1.15 * even


def test_too_long_sequences_are_refused_for_ranks_too() -> None:
    with pytest.raises(DataError, match="9 tokens does not fit"):
        plan_for_ranks([1, 9, 2], num_ranks=2, max_tokens=8)
    with pytest.raises(DataError, match="belong together"):
        plan_for_ranks([5, 5, 1], num_ranks=2, max_tokens=9, bundles=[0, 0, 1])


def test_operations_by_hand() -> None:
    # D 4, L 2, F 8, V 10, A 4, K 2: a layer has 2*16 + 2*8 + 3*32 = 144 weights, all 2*144 + 40.
    # T = 5: 2 * 5 * 328 = 3280, attention 2 * 2 * 4 * 25 = 400; three times their sum.
    shape = ModelShape(4, 2, 8, 10, 4, 2)
    assert sequence_flops(5, shape) == 3 * (3280 + 400)
    # As in the docstring of the typical shape, both terms are equal at 33,696 tokens.
    assert sequence_flops(2 * 33_696) == 3 * sequence_flops(33_696)
    assert TYPICAL_SHAPE.num_layers == 32
