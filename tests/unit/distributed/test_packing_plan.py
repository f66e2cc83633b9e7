"""Plans of micro-batches: every sequence once, budgets and bundles kept."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.distributed.packing.plan import Microbatch, plan_microbatches
from nemo_rl_core.errors import DataError

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@settings(deadline=None)
@given(LENGTHS, st.integers(40, 200))
def test_every_sequence_is_planned_once(lengths: list[int], max_tokens: int) -> None:
    planned = [
        index
        for part in plan_microbatches(lengths, max_tokens=max_tokens)
        for index in part.indices
    ]
    assert sorted(planned) == list(range(len(lengths)))


@settings(deadline=None)
@given(LENGTHS, st.integers(40, 200))
def test_budget_and_rows_are_kept(lengths: list[int], max_tokens: int) -> None:
    for part in plan_microbatches(lengths, max_tokens=max_tokens):
        assert len(part.rows) * part.row_length <= max_tokens
        assert part.row_length == max(lengths[index] for index in part.indices)
        assert all(0 < sum(lengths[index] for index in row) <= part.row_length for row in part.rows)


@settings(deadline=None)
@given(LENGTHS, st.integers(40, 200))
def test_plan_depends_only_on_lengths(lengths: list[int], max_tokens: int) -> None:
    first, second = (plan_microbatches(tuple(lengths), max_tokens=max_tokens) for _ in range(2))
    assert first == second


def test_the_tightest_fit_is_taken() -> None:
    # Longest first: 6 and 5 open rows of 6 tokens, with 0 and 1 to spare; 3 opens the last row that
    # 18 tokens allow (3 to spare); 2 fits only there (1 to spare); of the two rows with 1 token
    # left, the first one (row 1) takes the sequence of 1.
    plan = plan_microbatches([2, 6, 1, 5, 3], max_tokens=18)
    assert plan == [Microbatch(rows=((1,), (3, 2), (4, 0)), row_length=6)]


def test_sequence_that_does_not_fit_opens_another_microbatch() -> None:
    # Budget 8: two rows of 4 hold the sequences of 4; the 3 and the 3 get two rows of 3.
    assert plan_microbatches([3, 4, 4, 3], max_tokens=8) == [
        Microbatch(rows=((1,), (2,)), row_length=4),
        Microbatch(rows=((0,), (3,)), row_length=3),
    ]


def test_a_budget_below_one_sequence_is_refused() -> None:
    with pytest.raises(DataError, match="9 tokens does not fit") as caught:
        plan_microbatches([1, 9, 2], max_tokens=8)
    assert "8 tokens" in caught.value.expected
    assert plan_microbatches([], max_tokens=8) == []


@st.composite
def bundled(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Draws lengths, ids of bundles of at most three, and a budget that fits every bundle."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=20))
    ids = draw(st.permutations([7 * bundle for bundle, n in enumerate(sizes) for _ in range(n)]))
    lengths = draw(st.lists(st.integers(1, 40), min_size=len(ids), max_size=len(ids)))
    return lengths, ids, draw(st.integers(120, 300))


@settings(deadline=None)
@given(bundled())
def test_no_bundle_is_split(sample: tuple[list[int], list[int], int]) -> None:
    lengths, ids, max_tokens = sample
    plan = plan_microbatches(lengths, max_tokens=max_tokens, bundles=ids)
    assert sorted(index for part in plan for index in part.indices) == list(range(len(lengths)))
    homes = [{ids[index] for index in part.indices} for part in plan]
    assert sum(len(home) for home in homes) == len(set(ids))
    for part in plan:
        assert len(part.rows) * part.row_length <= max_tokens
        assert part.row_length == max(lengths[index] for index in part.indices)
        assert all(0 < sum(lengths[index] for index in row) <= part.row_length for row in part.rows)


@settings(deadline=None)
@given(LENGTHS, st.integers(40, 200), st.booleans())
def test_bundles_of_one_change_nothing(
    lengths: list[int], max_tokens: int, share_rows: bool
) -> None:
    """Bundles are tried one after the other; single sequences are found by their length."""
    of_one = range(len(lengths))
    tried = plan_microbatches(lengths, max_tokens=max_tokens, bundles=of_one, share_rows=share_rows)
    result = plan_microbatches(lengths, max_tokens=max_tokens, share_rows=share_rows)
    assert tried == result


def test_bundle_stays_in_one_microbatch() -> None:
    # Budget 12: two rows of 6. Bundle 0 (6 and 3) leaves room for 3 in its second row; bundle 1 (4
    # and 1) needs 4, and its 1, which would fit, waits with it; bundle 2 (2) and bundle 3 (1) fit.
    # Then bundle 1 gets separate micro-batches with rows of 4.
    plan = plan_microbatches([6, 3, 4, 1, 2, 1], max_tokens=12, bundles=[0, 0, 1, 1, 2, 3])
    assert plan == [
        Microbatch(rows=((0,), (1, 4, 5)), row_length=6),
        Microbatch(rows=((2,), (3,)), row_length=4),
    ]


def test_pairs_pack_nearly_as_tightly_as_single_sequences() -> None:
    generator = random.Random(0)
    lengths = [min(1024, 16 + int(generator.lognormvariate(5, 0.8))) for _ in range(1000)]
    pairs = [index // 2 for index in range(1000)]
    single = plan_microbatches(lengths, max_tokens=8192)
    paired = plan_microbatches(lengths, max_tokens=8192, bundles=pairs)
    # 221,218 tokens are 27.004 times 8192: 28 micro-batches at least.
    assert len(single) <= 29
    assert len(paired) <= len(single) + 1


@settings(deadline=None)
@given(LENGTHS, st.integers(40, 200))
def test_sequences_in_separate_rows(lengths: list[int], max_tokens: int) -> None:
    plan = plan_microbatches(lengths, max_tokens=max_tokens, share_rows=False)
    assert sorted(index for part in plan for index in part.indices) == list(range(len(lengths)))
    for part in plan:
        assert all(len(row) == 1 for row in part.rows)
        assert len(part.rows) * part.row_length <= max_tokens


def test_bundle_over_the_budget_names_the_setting_to_raise() -> None:
    # 5 and 4 need one row of 5 each, 1 fits after the 4: two rows of 5 are 10 tokens.
    with pytest.raises(DataError, match="3 sequences that belong together") as caught:
        plan_microbatches([5, 2, 4, 1], max_tokens=9, bundles=[3, 8, 3, 3])
    assert "2 rows of 5 tokens" in caught.value.got
    assert "max_tokens_per_microbatch to at least 10" in caught.value.fix
    assert len(plan_microbatches([5, 2, 4, 1], max_tokens=10, bundles=[3, 8, 3, 3])) == 2
