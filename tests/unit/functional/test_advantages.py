"""Group advantages by hand, and under reordering of rows and renaming of groups."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.functional.advantages import (
    group_centered,
    group_normalized,
    leave_one_out,
    zero_variance_fraction,
)

KINDS = [group_normalized, group_centered, leave_one_out]


def rows(rewards, group_ids):
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids)


def test_group_normalized_by_hand():
    # group 9: rewards 1, 0, 0, 0: mean 1/4, squares 9/16 + 3/16 = 3/4, unbiased variance 1/4
    # group 2: rewards 5, 7: mean 6, squares 2, variance 2
    result = group_normalized(*rows([1, 5, 0, 0, 7, 0], [9, 2, 9, 9, 2, 9]))
    root = math.sqrt(2)
    expected = [
        0.75 / (0.5 + 1e-6),
        -1 / (root + 1e-6),
        -0.25 / (0.5 + 1e-6),
        -0.25 / (0.5 + 1e-6),
        1 / (root + 1e-6),
        -0.25 / (0.5 + 1e-6),
    ]
    assert result.tolist() == pytest.approx(expected, rel=1e-12)


def test_group_centered_by_hand():
    result = group_centered(*rows([1, 5, 0, 0, 7, 0], [9, 2, 9, 9, 2, 9]))
    assert result.tolist() == [0.75, -1, -0.25, -0.25, 1, -0.25]


def test_leave_one_out_by_hand():
    # 1 - mean(0, 0, 0) = 1; 0 - mean(1, 0, 0) = -1/3; 5 - 7 and 7 - 5
    result = leave_one_out(*rows([1, 5, 0, 0, 7, 0], [9, 2, 9, 9, 2, 9]))
    assert result.tolist() == pytest.approx([1, -2, -1 / 3, -1 / 3, 2, -1 / 3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equal_rewards_give_exactly_zero_in_float32(kind, size):
    # The float32 mean of seven times 0.1 is not 0.1; divided by 1e-6 that would be no noise.
    rewards = torch.full((size,), 0.1)
    assert kind(rewards, torch.zeros(size, dtype=torch.int64)).tolist() == [0.0] * size


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_group(kind):
    result = kind(*rows([1, 0, math.nan, 3], [0, 0, 1, 1]))
    assert result.isnan().tolist() == [False, False, True, True]


def test_zero_variance_fraction_looks_at_groups():
    # groups: [1,0,0,0] informative, [1,1] not, [0] not: 2 of 3
    result = zero_variance_fraction(*rows([1, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 2]))
    assert result.item() == pytest.approx(2 / 3)


groups = st.lists(
    st.tuples(st.integers(0, 4), st.integers(-5, 5)), min_size=1, max_size=24
).flatmap(lambda pairs: st.tuples(st.just(pairs), st.permutations(range(len(pairs)))))


@settings(deadline=None)
@given(groups)
def test_agrees_with_each_group_alone_in_any_order(case):
    pairs, order = case
    ids = [10 * group - 7 for group, _ in pairs]  # neither dense nor positive
    rewards = [float(reward) for _, reward in pairs]
    for kind in KINDS:
        result = kind(*rows(rewards, ids))
        shuffled = kind(*rows([rewards[i] for i in order], [ids[i] for i in order]))
        torch.testing.assert_close(shuffled, result[list(order)])
        for own in set(ids):
            members = [i for i, group in enumerate(ids) if group == own]
            expected = one_group(kind, [rewards[i] for i in members])
            assert [result[i].item() for i in members] == pytest.approx(expected, abs=1e-9)


def one_group(kind, rewards):
    """The definitions, for the rewards of one group, in plain Python."""
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    if kind is group_normalized:
        return [(reward - mean) / (std + 1e-6) for reward in rewards]
    if kind is group_centered:
        return [reward - mean for reward in rewards]
    return [
        reward - statistics.fmean(rewards[:i] + rewards[i + 1 :])
        for i, reward in enumerate(rewards)
    ]


@settings(deadline=None)
@given(groups)
def test_advantages_of_a_group_sum_to_zero(case):
    pairs, _ = case
    rewards, ids = rows([float(reward) for _, reward in pairs], [group for group, _ in pairs])
    for kind in KINDS:
        sums = torch.zeros(5, dtype=torch.float64).index_add(0, ids, kind(rewards, ids))
        torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-9)


@settings(deadline=None)
@given(groups)
def test_zero_variance_fraction_counts_groups_without_advantage(case):
    pairs, _ = case
    ids = {group for group, _ in pairs}
    silent = [g for g in ids if len({reward for group, reward in pairs if group == g}) == 1]
    result = zero_variance_fraction(
        *rows([float(reward) for _, reward in pairs], [group for group, _ in pairs])
    )
    assert result.item() == pytest.approx(len(silent) / len(ids))
