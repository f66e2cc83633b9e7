"""Intervals and tests by hand, by enumeration and by simulation."""

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.pass_at_k import mean_pass_at_k, pass_at_k, pass_at_k_interval
from nemo_rl_core.evals.statistics import mcnemar_p_value, paired_bootstrap, wilson_interval


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
def test_wilson_covers_as_often_as_it_says(proportion):
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
        paired_bootstrap([0, 1], [1, 1], confidence=confidence, num_resamples=10, seed=0)


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


def test_pass_at_k_of_all_samples_has_wilsons_interval():
    # k = n: a prompt passes or does not, and 3 of 4 do.
    outcomes = [[True, False], [True, True], [False, False], [False, True]]
    found = pass_at_k_interval(outcomes, k=2, confidence=0.9)
    assert found == pytest.approx(wilson_interval(3, 4, 0.9))


def test_pass_at_k_interval_by_hand():
    # k = 1: 1/2, 1, 0, 1/2: mean 1/2, mean square 0.375, variance 1/8; with two prompts more of
    # the largest variance, 1/4, it is (4 / 8 + 2 / 4) / 6 = 1/6, so 4 prompts count as
    # 4 * (1/4) / (1/6) = 6: center 1/2, half z / (1 + z^2 / 6) * sqrt(1 / 24 + z^2 / 144)
    outcomes = [[True, False], [True, True], [False, False], [False, True]]
    z = 1.959964
    half = z / (1 + z**2 / 6) * math.sqrt(1 / 24 + z**2 / 144)
    found = pass_at_k_interval(outcomes, k=1, confidence=0.95)
    assert found == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)


def test_as_many_prompts_as_samples_is_the_most_that_count():
    # All prompts alike: the variance of two prompts would make 20 * 22 / 2 = 220 of 20 prompts.
    outcomes = [[True, False]] * 20
    found = pass_at_k_interval(outcomes, k=1, confidence=0.95)
    assert found == pytest.approx(wilson_interval(20, 40, 0.95))
    # Nothing solved: nothing is known of the spread, so that a prompt counts once.
    nothing = pass_at_k_interval([[False, False]] * 20, k=1, confidence=0.95)
    assert nothing == pytest.approx(wilson_interval(0, 20, 0.95))


@pytest.mark.parametrize("num_prompts", [10, 40])
@pytest.mark.parametrize("k", [1, 2, 4])  # 8 of 8 is Wilson's own interval
@pytest.mark.parametrize(
    "difficulty",
    # Shapes of a beta distribution: known or not, all kinds, mostly hard, mostly easy, all alike.
    [(0.3, 0.3), (1, 1), (0.3, 3), (5, 0.5), (200, 200)],
    ids=str,
)
def test_pass_at_k_interval_covers_as_often_as_it_says(difficulty, k, num_prompts):
    # 300 evaluations of new prompts, 8 samples each; at 95 % about 285 hold the true value.
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


def test_paired_bootstrap_of_equal_differences_has_no_width():
    result = paired_bootstrap(
        [0.0, 0.25, 0.5], [0.5, 0.75, 1.0], confidence=0.95, num_resamples=50, seed=0
    )
    assert result == (0.5, 0.5, 0.5)


def test_paired_bootstrap_is_close_to_the_normal_interval():
    # 400 differences: 140 gains, 60 losses: mean 0.2, variance 0.5 - 0.04 = 0.46,
    # standard error sqrt(0.46 / 400) = 0.033912, times 1.959964 = 0.066466
    before = [0] * 140 + [1] * 60 + [1] * 200
    after = [1] * 140 + [0] * 60 + [1] * 200
    result = paired_bootstrap(before, after, confidence=0.95, num_resamples=10_000, seed=1)
    assert result.difference == pytest.approx(0.2)
    assert result.lower == pytest.approx(0.2 - 0.066466, abs=4e-3)
    assert result.upper == pytest.approx(0.2 + 0.066466, abs=4e-3)


def test_paired_bootstrap_quantiles_by_enumeration():
    # Differences 0 and 1 resampled in pairs: means 0, 1/2, 1 with chances 1/4, 1/2, 1/4. At
    # confidence 0.6 the tails are 0.2 < 1/4, at confidence 0.4 they are 0.3 > 1/4.
    wide = paired_bootstrap([0, 0], [0, 1], confidence=0.6, num_resamples=4000, seed=0)
    narrow = paired_bootstrap([0, 0], [0, 1], confidence=0.4, num_resamples=4000, seed=0)
    assert wide == (0.5, 0.0, 1.0)
    assert narrow == (0.5, 0.5, 0.5)


def test_paired_bootstrap_is_a_function_of_its_seed():
    source = random.Random(3)
    before, after = ([source.random() for _ in range(50)] for _ in range(2))

    def run(seed):
        return paired_bootstrap(before, after, confidence=0.9, num_resamples=200, seed=seed)

    assert run(1) == run(1)
    assert run(1) != run(2)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=30))
def test_paired_bootstrap_stays_within_the_differences_and_mirrors(pairs):
    before, after = (list(scores) for scores in zip(*pairs, strict=True))
    result = paired_bootstrap(before, after, confidence=0.9, num_resamples=100, seed=0)
    differences = [new - old for old, new in pairs]
    assert min(differences) - 1e-9 <= result.lower <= result.upper <= max(differences) + 1e-9
    swapped = paired_bootstrap(after, before, confidence=0.9, num_resamples=100, seed=0)
    mirrored = (-swapped.difference, -swapped.upper, -swapped.lower)
    assert result == pytest.approx(mirrored, abs=1e-9)


def test_paired_bootstrap_covers_as_often_as_it_says():
    # True improvement 0.15: each of 80 prompts is gained with 0.3 and lost with 0.15. Of 400
    # simulated evaluations 95 % should cover; the binomial spread is 1.1 points.
    source = random.Random(0)
    covered = 0
    for trial in range(400):
        samples = [source.random() for _ in range(80)]
        before = [0 if sample < 0.3 else 1 for sample in samples]
        after = [0 if 0.3 <= sample < 0.45 else 1 for sample in samples]
        result = paired_bootstrap(before, after, confidence=0.95, num_resamples=400, seed=trial)
        covered += result.lower <= 0.15 <= result.upper
    assert 0.915 <= covered / 400 <= 0.98


@pytest.mark.parametrize(("before", "after"), [([1, 2], [1]), ([], []), ([1], [1])])
def test_paired_bootstrap_needs_pairs(before, after):
    with pytest.raises(DataError, match="same prompts"):
        paired_bootstrap(before, after, confidence=0.95, num_resamples=10, seed=0)


def test_paired_bootstrap_refuses_failed_rewards():
    with pytest.raises(DataError, match="finite"):
        paired_bootstrap([0, math.nan], [1, 1], confidence=0.95, num_resamples=10, seed=0)


def test_mcnemar_by_hand():
    # 5 gained, 1 lost: 2 * (C(6,0) + C(6,1)) / 2^6 = 14 / 64
    before = [False] * 5 + [True] + [True] * 10
    after = [True] * 5 + [False] + [True] * 10
    assert mcnemar_p_value(before, after) == 14 / 64
    assert mcnemar_p_value(after, before) == 14 / 64
    assert mcnemar_p_value(before, before) == 1
    # 1 gained, 1 lost: twice the tail would be 1.5
    assert mcnemar_p_value([True, False], [False, True]) == 1


def test_mcnemar_of_many_prompts_does_not_overflow():
    # 3000 gained, none lost: 2 / 2^3000 is below the smallest float
    assert mcnemar_p_value([False] * 3000, [True] * 3000) == 0
    assert 0 < mcnemar_p_value([False] * 1000, [True] * 1000) < 1e-300


def test_mcnemar_rejects_no_oftener_than_it_says():
    # Under the null, n changed prompts: the chance of p <= 0.05 over all outcomes is at most 0.05.
    for changed in range(1, 40):
        rejected = sum(
            math.comb(changed, gained)
            for gained in range(changed + 1)
            if mcnemar_p_value(
                [False] * gained + [True] * (changed - gained),
                [True] * gained + [False] * (changed - gained),
            )
            <= 0.05
        )
        assert rejected / 2**changed <= 0.05


def test_mcnemar_needs_pairs():
    with pytest.raises(DataError, match="same prompts"):
        mcnemar_p_value([True], [True, False])
