"""Intervals and tests by hand, by enumeration and by simulation."""

import functools
import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.statistics import (
    exact_interval,
    mcnemar_p_value,
    mean_pass_at_k,
    paired_interval,
    pass_at_k,
    pass_at_k_interval,
    wilson_interval,
)


def test_wilson_by_hand():
    # z = 1.959964, z^2 = 3.841459; center (0.8 + 0.192073) / 1.3841459 = 0.716740;
    # half 1.959964 / 1.3841459 * sqrt(0.016 + 0.009604) = 0.226576
    assert wilson_interval(8, 10, 0.95) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    # 0 of 10: the upper end is z^2 / (n + z^2) = 3.841459 / 13.841459 = 0.277533
    assert wilson_interval(0, 10, 0.95) == pytest.approx((0, 0.277533), abs=1e-6)


@given(st.integers(1, 500), st.data(), st.floats(0.5, 0.999))
def test_wilson_properties(total, data, confidence):
    successes = data.draw(st.integers(0, total))
    lower, upper = wilson_interval(successes, total, confidence)
    assert 0 <= lower <= successes / total <= upper <= 1
    mirrored = wilson_interval(total - successes, total, confidence)
    assert (1 - upper, 1 - lower) == pytest.approx(mirrored, abs=1e-12)
    wider = wilson_interval(successes, total, (1 + confidence) / 2)
    assert wider.lower <= lower
    assert upper <= wider.upper


@pytest.mark.parametrize("proportion", [0.1, 0.4, 0.75])
def test_wilson_coverage_is_nominal(proportion):
    # The exact coverage, summed over all outcomes of 60 trials; Wilson's is close to nominal.
    total = 60
    covered = sum(
        math.comb(total, k) * proportion**k * (1 - proportion) ** (total - k)
        for k in range(total + 1)
        if wilson_interval(k, total, 0.95).lower
        <= proportion
        <= wilson_interval(k, total, 0.95).upper
    )
    assert 0.93 <= covered <= 0.975


@pytest.mark.parametrize(("successes", "total"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes, total):
    with pytest.raises(DataError, match="successes"):
        wilson_interval(successes, total, 0.95)


@pytest.mark.parametrize("confidence", [0, 1, 95])
def test_a_confidence_is_a_probability(confidence):
    with pytest.raises(DataError, match="probability"):
        wilson_interval(1, 2, confidence)
    with pytest.raises(DataError, match="probability"):
        paired_interval(1, 0, 2, confidence)


def test_pass_at_k_by_hand():
    # 4 samples, 1 correct, 2 chosen: 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(5, 0, 5) == 0
    assert pass_at_k(5, 1, 5) == 1
    # Factorials far beyond a float: 1 - C(999, 500) / C(1000, 500) = 500 / 1000
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    expected = Fraction(sum(any(subset) for subset in subsets), len(subsets))
    assert pass_at_k(n, c, k) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(DataError, match="pass@k"):
        pass_at_k(n, c, k)


def test_mean_pass_at_k_by_hand():
    outcomes = [[True, False, False, False], [True, True], [False, False, False]]
    # k = 2: 1/2, 1, 0
    assert mean_pass_at_k(outcomes, k=2) == pytest.approx(0.5)
    # k = 1: 1/4, 1, 0
    assert mean_pass_at_k(outcomes, k=1) == pytest.approx(1.25 / 3)
    with pytest.raises(DataError, match="no prompts"):
        mean_pass_at_k([], k=1)


def test_the_interval_for_k_equal_to_n_is_wilsons():
    # k = n: 3 of 4 prompts pass.
    outcomes = [[True, False], [True, True], [False, False], [False, True]]
    interval = pass_at_k_interval(outcomes, k=2, confidence=0.9)
    assert interval == pytest.approx(wilson_interval(3, 4, 0.9))


def test_pass_at_k_interval_by_hand():
    # k = 1: 1/2, 1, 0, 1/2: mean 1/2, mean square 0.375, variance 1/8; with two more prompts of
    # the largest variance, 1/4, it is (4 / 8 + 2 / 4) / 6 = 1/6, so 4 prompts count as
    # 4 * (1/4) / (1/6) = 6: center 1/2, half z / (1 + z^2 / 6) * sqrt(1 / 24 + z^2 / 144)
    outcomes = [[True, False], [True, True], [False, False], [False, True]]
    z = 1.959964
    half = z / (1 + z**2 / 6) * math.sqrt(1 / 24 + z**2 / 144)
    interval = pass_at_k_interval(outcomes, k=1, confidence=0.95)
    assert interval == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)


def test_the_effective_number_of_prompts_is_at_most_the_number_of_samples():
    # Equal prompts: the variance of the two added ones would count 20 prompts as 20 * 22 / 2 = 220.
    outcomes = [[True, False]] * 20
    interval = pass_at_k_interval(outcomes, k=1, confidence=0.95)
    assert interval == pytest.approx(wilson_interval(20, 40, 0.95))
    # Nothing solved: the spread is unknown, so each prompt counts once.
    nothing = pass_at_k_interval([[False, False]] * 20, k=1, confidence=0.95)
    assert nothing == pytest.approx(wilson_interval(0, 20, 0.95))


@pytest.mark.parametrize("num_prompts", [10, 40])
@pytest.mark.parametrize("k", [1, 2, 4])  # 8 of 8 is Wilson's interval
@pytest.mark.parametrize(
    "difficulty",
    # Beta distributions: bimodal, uniform, mostly hard, mostly easy, nearly equal.
    [(0.3, 0.3), (1, 1), (0.3, 3), (5, 0.5), (200, 200)],
    ids=str,
)
def test_pass_at_k_interval_coverage_is_nominal(difficulty, k, num_prompts):
    # 300 evaluations of new prompts, 8 samples each; at 95 % about 285 contain the true value.
    rng = random.Random(f"{difficulty} {k} {num_prompts}")
    a, b = difficulty
    # 1 - E(1 - p)^k of a beta distribution
    true = 1 - math.prod((b + i) / (a + b + i) for i in range(k))
    covered, num_evaluations = 0, 300
    for _ in range(num_evaluations):
        chances = [rng.betavariate(a, b) for _ in range(num_prompts)]
        outcomes = [[rng.random() < chance for _ in range(8)] for chance in chances]
        low, high = pass_at_k_interval(outcomes, k=k, confidence=0.95)
        covered += low <= true <= high
    assert covered >= 0.91 * num_evaluations


def test_exact_interval_by_hand():
    # 0 of 4: the upper bound p has (1 - p)^4 = 0.025, p = 1 - 0.025^(1/4) = 0.602365.
    assert exact_interval(0, 4, 0.95) == pytest.approx((0, 0.602365), abs=1e-6)
    # 1 of 2: under the lower bound p, 1 - (1 - p)^2 = 0.025, p = 1 - sqrt(0.975) = 0.012579.
    assert exact_interval(1, 2, 0.95) == pytest.approx((0.012579, 0.987421), abs=1e-6)
    assert exact_interval(0, 0, 0.95) == (0, 1)


@given(st.integers(1, 300), st.data(), st.floats(0.5, 0.999))
def test_the_bounds_of_the_exact_interval_have_the_tail_probability(total, data, confidence):
    successes = data.draw(st.integers(1, total))
    lower = exact_interval(successes, total, confidence).lower
    tail = sum(
        math.comb(total, k) * lower**k * (1 - lower) ** (total - k)
        for k in range(successes, total + 1)
    )
    assert tail == pytest.approx((1 - confidence) / 2, rel=1e-6)


def test_paired_interval_by_hand():
    # 1 gained, 0 lost of 2 at 0.9: gains between 0.05 and 1; changed between 1 - sqrt(0.95) =
    # 0.025321 and 0.974679. Low (2 * 0.05 - 1) * 0.974679, high (2 * 1 - 1) * 0.974679.
    assert paired_interval(1, 0, 2, 0.9) == pytest.approx((-0.877211, 0.974679), abs=1e-6)
    # 6 gained, 0 lost of 6: gains at least 0.025^(1/6) = 0.540740, which are also the changed.
    low = (2 * 0.540740 - 1) * 0.540740
    assert paired_interval(6, 0, 6, 0.95) == pytest.approx((low, 1), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "confidence",
    [0.8, 0.95, *(pytest.param(each, marks=pytest.mark.thorough) for each in (0.9, 0.99))],
)
def test_paired_interval_and_mcnemar_never_contradict(confidence):
    pairs = list(itertools.product(range(40), repeat=2))
    intervals = {pair: paired_interval(*pair, 100, confidence) for pair in pairs}
    for gained, lost in pairs:
        low, high = intervals[gained, lost]
        rejected = mcnemar_p_value(gained, lost) < 1 - confidence
        assert (low > 0 or high < 0) == rejected, (gained, lost)
        assert low <= (gained - lost) / 100 <= high
        assert intervals[lost, gained] == pytest.approx((-high, -low))


@functools.cache
def interval_of_sixty(gained, lost):
    return paired_interval(gained, lost, 60, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("true", [0.0, 0.1, 0.3])
def test_the_error_rate_of_the_paired_interval_is_at_most_nominal(true):
    # By enumeration: the chance, over all outcomes of 60 prompts, of an interval above (below) the
    # true difference is at most 0.025.
    total = 60
    for loss in (0.001, 0.05, 0.2, 0.34):
        gain = true + loss
        above = below = 0.0
        for gained in range(total + 1):
            for lost in range(total + 1 - gained):
                same = total - gained - lost
                chance = math.comb(total, gained) * math.comb(total - gained, lost)
                chance *= gain**gained * loss**lost * (1 - gain - loss) ** same
                interval = interval_of_sixty(gained, lost)
                above += chance * (interval.lower > true)
                below += chance * (interval.upper < true)
        assert above <= 0.025, loss
        assert below <= 0.025, loss


def test_mcnemar_by_hand():
    # 5 gained, 1 lost: 2 * (C(6,0) + C(6,1)) / 2^6 = 14 / 64
    assert mcnemar_p_value(5, 1) == mcnemar_p_value(1, 5) == 14 / 64
    assert mcnemar_p_value(0, 0) == 1
    # 1 gained, 1 lost: twice the tail would be 1.5
    assert mcnemar_p_value(1, 1) == 1


def test_mcnemar_of_many_prompts_does_not_overflow():
    # 3000 gained, none lost: 2 / 2^3000 is below the smallest float
    assert mcnemar_p_value(3000, 0) == 0
    assert 0 < mcnemar_p_value(1000, 0) < 1e-300


def test_the_error_rate_of_mcnemar_is_at_most_nominal():
    # Under the null, n changed prompts: the chance of p <= 0.05 over all outcomes is at most 0.05.
    for changed in range(1, 40):
        rejected = sum(
            math.comb(changed, gained)
            for gained in range(changed + 1)
            if mcnemar_p_value(gained, changed - gained) <= 0.05
        )
        assert rejected / 2**changed <= 0.05
