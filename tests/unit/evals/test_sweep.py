"""Means over seeds, their intervals and the paired test, against values computed by hand."""

import itertools
import math

import pytest

from nemo_rl_core.evals.sweep import (
    SweptSetting,
    sign_flip_p_value,
    student_quantile,
    summarize,
)
from nemo_rl_core.history.records import point_label


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    # A table of Student's distribution.
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042)],
)
def test_quantiles_match_a_published_table(degrees: int, quantile: float) -> None:
    assert student_quantile(0.975, degrees=degrees) == pytest.approx(quantile, abs=5e-4)


def sweep(accuracies: dict[object, list[float | None]]):
    """One setting per key, one seed per item of its list."""
    points = [
        ({"seed": seed, "grpo.rate": rate}, values[seed])
        for rate, values in accuracies.items()
        for seed in range(len(values))
    ]
    return summarize(points, apart="seed", confidence=0.95)


def test_settings_are_grouped_over_seeds_in_their_order() -> None:
    first, second = sweep({2: [0.5, 0.7, 0.6], 1: [0.25]}).settings
    # The deviation of 0.5, 0.7 and 0.6 is 0.1.
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert (first.fields, first.mean) == ({"grpo.rate": 2}, pytest.approx(0.6))
    assert first.low == pytest.approx(0.6 - half, abs=1e-4)
    assert first.high == pytest.approx(0.6 + half, abs=1e-4)
    assert first.described == f"rate 2: 0.600 [{0.6 - half:.3f}, {0.6 + half:.3f}] (3 points)"
    assert (second.mean, second.low, second.high) == (0.25, None, None)
    assert second.described == "rate 1: 0.250 (1 point)"


@pytest.mark.parametrize("values", [[0.124, 0.146], [0.9, 1.0], [0.0, 0.0], [0.0, 1.0]])
def test_intervals_of_accuracies_stay_between_0_and_1(values: list[float | None]) -> None:
    (setting,) = sweep({1: values}).settings
    assert setting.mean is not None and setting.low is not None and setting.high is not None
    assert 0 <= setting.low <= setting.mean <= setting.high <= 1


@pytest.mark.parametrize(
    "differences",
    [[0.1], [0.02, 0.02], [0.1, -0.2, 0.05], [0.0, 0.1, 0.1], [0.03, 0.01, 0.02, 0.07, -0.01]],
)
def test_p_values_match_an_enumeration_of_sign_patterns(differences: list[float]) -> None:
    observed = abs(sum(differences)) - 1e-9
    patterns = list(itertools.product((-1, 1), repeat=len(differences)))
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in patterns]
    expected = sum(abs(total) >= observed for total in sums) / len(patterns)
    assert sign_flip_p_value(differences) == expected


def test_the_test_handles_many_seeds_and_none() -> None:
    assert sign_flip_p_value([]) == 1
    assert sign_flip_p_value([0.01] * 60) == 2 / 2**60
    assert sign_flip_p_value([0.0] * 8) == 1


def test_two_seeds_never_show_a_best_setting() -> None:
    # The same difference on both seeds: its standard deviation is 0, so a t test would give p = 0.
    result = sweep({2e-4: [0.124, 0.146], 5e-4: [0.224, 0.246]})
    assert result.leader == {"grpo.rate": 5e-4}
    assert result.best is None
    assert result.verdict == (
        "no best setting at 95 % confidence: rate 0.0005 (mean 0.235) is not shown to be better "
        "than rate 0.0002 (mean 0.135), p 0.5 on 2 shared seeds; 95 % confidence needs at least 6"
    )


def test_a_setting_that_is_better_on_all_of_six_seeds_is_the_best() -> None:
    low = [0.10, 0.12, 0.11, 0.13, 0.10, 0.12]
    high = [each + 0.05 for each in low]
    result = sweep({1: low, 2: high, 3: [each + 0.01 for each in low]})
    assert result.best == {"grpo.rate": 2}
    assert [each.p_value for each in result.comparisons] == [2 / 64, 2 / 64]
    assert result.verdict == (
        "best: rate 2, better than every other setting at 95 % confidence "
        "(paired exact test, p at most 0.031)"
    )
    # The seeds' noise cancels out; one seed with the opposite difference does not.
    mixed = sweep({1: low, 2: [*high[:5], low[5] - 0.05]})
    assert mixed.best is None
    assert mixed.verdict.endswith("p 0.22 on 6 shared seeds")


def test_a_setting_with_failed_seeds_is_never_the_best() -> None:
    low: list[float | None] = [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    lucky: list[float | None] = [0.9, None, None, None, None, None, None]
    result = sweep({1: low, 2: lucky})
    assert result.leader == {"grpo.rate": 1}
    assert result.best is None
    assert "p 1 on 1 shared seed; 95 % confidence needs at least 6" in result.verdict
    assert result.settings[1].described == "rate 2: 0.900 (1 point, 6 failed)"
    nothing = sweep({1: [0.5, None], 2: [None, 0.4]})
    assert (nothing.leader, nothing.best) == (None, None)
    assert nothing.verdict.startswith("no best setting: points of every setting failed")


def test_a_setting_with_only_failed_seeds_is_listed_but_not_compared() -> None:
    low: list[float | None] = [0.1, 0.11, 0.12, 0.1, 0.13, 0.1]
    result = sweep({1: low, 2: [0.5] * 6, 3: [None] * 6})
    assert result.best == {"grpo.rate": 2}
    assert result.settings[2].described == "rate 3: failed"


def test_one_setting_or_one_seed_gives_no_best_setting() -> None:
    assert sweep({1: [0.5, 0.6]}).verdict == "one setting, nothing to compare"
    points = [({"rate": rate}, 0.1 * rate) for rate in (1, 2)]
    result = summarize(points, apart="seed", confidence=0.9)
    assert result.best is None
    assert "p 1 on 1 shared seed; 90 % confidence needs at least 5" in result.verdict


def test_labels_drop_sections_unless_that_is_ambiguous() -> None:
    assert point_label({"seed": 0, "grpo.loss.kl.beta": 0.1}) == "seed 0, beta 0.1"
    both = {"sft.learning_rate": 1e-3, "grpo.learning_rate": 1e-4}
    assert point_label(both) == "sft.learning_rate 0.001, grpo.learning_rate 0.0001"
    assert SweptSetting({}, {0: 0.5}, mean=0.5).described == "the recipe: 0.500 (1 point)"
