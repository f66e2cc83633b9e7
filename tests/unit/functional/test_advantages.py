"""Group advantages by hand, and under reordering of rows and renaming of groups."""

import math
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.functional.advantages import (
    Moments,
    decoupled_group_normalized,
    group_centered,
    group_normalized,
    informative_groups,
    leave_one_out,
    reinforce_plus_plus,
    whitened,
    zero_variance_fraction,
)
from nemo_rl_core.functional.rewards import outcome_rewards
from nemo_rl_core.functional.value import gae

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


def test_penalty_is_scaled_by_the_std_of_outcomes():
    # group 0: 0.9 and -0.4 after the penalty, 1 and 0 before it with the std sqrt(1/2);
    # group 1: equal outcomes, which the penalty does not tell apart.
    rewards, ids = rows([0.9, -0.4, 2.9, 2.6], [0, 0, 1, 1])
    outcomes, _ = rows([1, 0, 3, 3], [0, 0, 1, 1])
    result = group_normalized(rewards, ids, outcomes=outcomes)
    root = math.sqrt(0.5)
    expected = [0.65 / (root + 1e-6), -0.65 / (root + 1e-6), 0, 0]
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
def test_agrees_with_separate_groups_in_any_order(case):
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


def test_the_only_success_of_a_group_keeps_its_leave_one_out_advantage():
    # The three others of the success are all equal, so a filter on their std would drop it.
    rewards, ids = rows([1, 0, 0, 0], [5, 5, 5, 5])
    assert leave_one_out(rewards, ids).tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert informative_groups(rewards, ids).tolist() == [True] * 4


def test_informative_groups_by_hand():
    result = informative_groups(*rows([1, 0, 1, 0, 1, 3], [0, 1, 0, 2, 1, 9]))
    # groups [1, 1], [0, 1], [0] and [3]
    assert result.tolist() == [False, True, False, False, True, False]


def test_whitening_by_hand():
    values = torch.tensor([[1.0, 3.0, math.nan], [8.0, math.inf, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    # mean 4, deviations -3, -1, 4, squares 26, unbiased variance 13
    std = math.sqrt(13) + 1e-6
    expected = [[-3 / std, -1 / std, 0], [4 / std, 0, 0]]
    torch.testing.assert_close(whitened(values, mask), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("count", [0, 1, 7])
def test_whitening_equal_entries_gives_exactly_zero(count):
    # The float32 mean of seven times 0.1 is not 0.1.
    mask = torch.arange(9) < count
    assert whitened(torch.full((9,), 0.1), mask).tolist() == [0.0] * 9


def test_moments_of_parts_join_by_hand():
    first = Moments(count=3, mean=2.0, squares=2.0, lowest=1.0, highest=3.0)  # 1, 2, 3
    second = Moments(count=1, mean=10.0, squares=0.0, lowest=10.0, highest=10.0)
    empty = Moments.of(torch.zeros(0, 4), torch.zeros(0, 4).bool())
    # 1, 2, 3, 10: mean 4, deviations -3, -2, -1, 6, squares 50
    expected = Moments(count=4, mean=4.0, squares=50.0, lowest=1.0, highest=10.0)
    assert Moments.joined([empty, first, empty, second]) == expected
    assert Moments.joined([second, first]) == expected
    assert Moments.joined([empty, empty]) == empty == Moments(0, 0.0, 0.0, math.inf, -math.inf)


@pytest.mark.parametrize(
    ("offset", "scale"), [(0, 1e-30), (1, 1e-3), (-3e8, 1e-3), (1e15, 100), (1e15, 1e12), (0, 1e60)]
)
def test_joined_moments_against_exact_sums(offset, scale):
    """Offsets so large that a mean of squares less a squared mean has no digit of the spread."""
    drawn = torch.Generator().manual_seed(0)
    sizes = [1, 0, 500, 2, 61, 1]
    parts = [
        offset + scale * (k + torch.randn(n, generator=drawn, dtype=torch.float64))
        for k, n in enumerate(sizes)
    ]
    result = Moments.joined([Moments.of(part, torch.ones(len(part)).bool()) for part in parts])
    exact = [Fraction(value) for part in parts for value in part.tolist()]
    mean = sum(exact) / len(exact)
    squares = float(sum((value - mean) ** 2 for value in exact))
    # The values themselves are rounded to so much of their spread.
    rounding = 1e-12 + 1e-15 * abs(offset) / scale
    assert rounding < 0.02
    assert result.count == len(exact)
    assert result.mean == pytest.approx(float(mean), rel=1e-14, abs=1e-15 * scale)
    assert result.squares == pytest.approx(squares, rel=rounding)
    assert (result.lowest, result.highest) == (float(min(exact)), float(max(exact)))


def test_parts_are_whitened_like_the_full_batch():
    drawn = torch.Generator().manual_seed(0)
    values = 20 + 3 * torch.randn(40, 9, generator=drawn)
    mask = torch.rand(40, 9, generator=drawn) < 0.6
    full = whitened(values, mask)
    assert torch.equal(whitened(values, mask, Moments.joined([Moments.of(values, mask)])), full)
    ends = [(0, 3), (3, 3), (3, 30), (30, 40)]
    parts = [(values[start:end], mask[start:end]) for start, end in ends]
    moments = Moments.joined([Moments.of(*part) for part in parts])
    result = torch.cat([whitened(*part, moments) for part in parts])
    torch.testing.assert_close(result, full, rtol=1e-5, atol=1e-6)


def test_parts_of_equal_entries_are_exactly_zero_only_if_they_equal_one_another():
    mask = torch.ones(1, 3).bool()
    parts = [torch.full((1, 3), value) for value in (0.1, 0.3)]
    same = Moments.joined([Moments.of(parts[0], mask)] * 2)
    assert whitened(parts[0], mask, same).tolist() == [[0.0] * 3]
    moments = Moments.joined([Moments.of(part, mask) for part in parts])
    # Deviations +-0.1, six squares of 0.01, variance 0.06 / 5
    expected = 0.1 / (math.sqrt(0.012) + 1e-6)
    assert whitened(parts[0], mask, moments).tolist() == [pytest.approx([-expected] * 3, rel=1e-5)]


def test_nan_reaches_every_part():
    mask = torch.ones(2).bool()
    parts = [torch.tensor([1.0, 1.0]), torch.tensor([1.0, math.nan])]
    moments = Moments.joined([Moments.of(part, mask) for part in parts])
    assert whitened(parts[0], mask, moments).isnan().all()


def test_gdpo_by_hand():
    # Two groups of two. First reward: [1, 0] and [0, 0]; second: [0, 4] and [2, 0].
    rewards = torch.tensor([[1, 0], [0, 4], [0, 2], [0, 0]], dtype=torch.float64)
    ids, valid = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    result = decoupled_group_normalized(rewards, ids, valid, weights=[2.0, 1.0])
    # A pair that differs by d has deviations +-d/2 and std d/sqrt(2), so +-1/sqrt(2) =: +-s:
    # first s, -s, 0, 0; second -s, s, s, -s; 2 * first + second = s, -s, s, -s, of mean 0 and
    # unbiased std sqrt(4 s^2 / 3) = sqrt(2 / 3)
    expected = math.sqrt(0.5) / math.sqrt(2 / 3)
    assert result.tolist() == pytest.approx([expected, -expected] * 2, rel=1e-5)


def test_gdpo_distinguishes_one_reward_from_two():
    # A group in which one reward was won, and a group in which both were.
    rewards = torch.tensor([[0, 0], [1, 0], [0, 0], [1, 1]], dtype=torch.float64)
    ids, valid = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    of_sums = group_normalized(rewards.sum(dim=1), ids)
    assert of_sums[3].item() == pytest.approx(of_sums[1].item(), rel=1e-5)
    result = decoupled_group_normalized(rewards, ids, valid, weights=[1.0, 1.0])
    assert result[3].item() == pytest.approx(2 * result[1].item())


def test_gdpo_needs_a_weight_for_each_reward():
    with pytest.raises(ValueError, match="zip"):
        decoupled_group_normalized(
            torch.zeros(2, 2), torch.zeros(2).long(), torch.ones(2).bool(), weights=[1.0]
        )


def test_gdpo_whitens_over_valid_sequences_only():
    rewards = torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64)
    ids, valid = torch.tensor([0, 0, 1, 1]), torch.tensor([True, True, False, False])
    result = decoupled_group_normalized(rewards, ids, valid, weights=[1.0])
    # +-s whitened over two: +-s / (s sqrt(2))
    assert result.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0, 0], rel=1e-5)


def test_reinforce_plus_plus_by_hand():
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    rewards = torch.tensor([[-1.0, 4.0], [1.0, math.nan]], dtype=torch.float64)
    # returns 3, 4 and 1: mean 8/3, deviations 1/3, 4/3, -5/3, squares 42/9, variance 7/3
    std = math.sqrt(7 / 3) + 1e-6
    expected = torch.tensor([[1 / 3, 4 / 3], [-5 / 3, 0]], dtype=torch.float64) / std
    torch.testing.assert_close(reinforce_plus_plus(rewards, mask), expected)


def test_reinforce_plus_plus_weights_sequences_by_their_tokens():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    rewards = outcome_rewards(torch.tensor([1.0, 0.0], dtype=torch.float64), mask)
    # tokens 1, 1, 1, 0: mean 3/4, unbiased variance 1/4
    result = reinforce_plus_plus(rewards, mask)
    expected = torch.tensor([[0.5, 0.5, 0.5], [-1.5, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=0)


def test_gae_by_hand():
    mask = torch.tensor([[1, 0, 1, 1, 0]]).bool()
    nan = math.nan
    rewards = torch.tensor([[1.0, nan, 0.0, 2.0, nan]])
    values = torch.tensor([[3.0, nan, 1.0, 4.0, nan]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    # token 3: 2 + 0 - 4 = -2
    # token 2: 0 + 0.5 * 4 - 1 = 1, plus 0.25 * -2 = 0.5
    # token 0: 1 + 0.5 * 1 - 3 = -1.5, plus 0.25 * 0.5 = -1.375; token 1 is stepped over
    assert advantages.tolist() == [[-1.375, 0, 0.5, -2, 0]]
    assert returns.tolist() == [[1.625, 0, 1.5, 2, 0]]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.booleans()), min_size=1),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
    st.none() | st.integers(-3, 3),
)
def test_gae_is_the_discounted_sum_of_errors_over_valid_tokens(tokens, gamma, lam, last):
    rewards, values, mask = (torch.tensor([column]) for column in zip(*tokens, strict=True))
    last_values = None if last is None else torch.tensor([last]).double()
    advantages, returns = gae(
        rewards.double(), values.double(), mask, gamma=gamma, lam=lam, last_values=last_values
    )
    valid = [(reward, value) for reward, value, is_valid in tokens if is_valid]
    following = [*(value for _, value in valid[1:]), last or 0][: len(valid)]
    errors = [r + gamma * n - v for (r, v), n in zip(valid, following, strict=True)]
    expected = [
        sum((gamma * lam) ** k * error for k, error in enumerate(errors[i:]))
        for i in range(len(valid))
    ]
    assert advantages[mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()
    sums = [a + v for a, (_, v) in zip(expected, valid, strict=True)]
    assert returns[mask].tolist() == pytest.approx(sums, abs=1e-9)
