"""Comparisons of two evaluations, with figures computed by hand and by enumeration."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.comparison import Comparison, compare, detectable_difference

Z_LEVEL, Z_POWER = 1.959964, 0.841621
"""Two-sided 5 %, and 80 % power."""


def outcomes(right: str) -> dict[str, bool | None]:
    """`+` right, `-` wrong, `?` not scored; prompt ids are indices."""
    return {str(index): {"+": True, "-": False}.get(each) for index, each in enumerate(right)}


def test_figures_by_hand() -> None:
    compared = compare(outcomes("++---?-+"), outcomes("-++++++?"), confidence=0.95)
    # Scored in both: prompts 0 to 4 and 6. Right before: 0, 1. Right after: 1, 2, 3, 4, 6.
    assert (compared.num_prompts, compared.num_unscored) == (6, 2)
    assert compared.before == pytest.approx(2 / 6)
    assert compared.after == pytest.approx(5 / 6)
    assert compared.difference == pytest.approx(3 / 6)
    assert (compared.gained, compared.lost) == (4, 1)
    # McNemar: 2 * (C(5, 0) + C(5, 1)) / 2^5
    assert compared.p_value == 12 / 32
    assert compared.low < 0.5 < compared.high


def test_order_of_prompts_does_not_matter() -> None:
    before, after = outcomes("+-+-+--"), outcomes("++--+++")
    mixed = dict(sorted(after.items(), reverse=True))
    first = compare(before, after, confidence=0.9)
    assert compare(before, mixed, confidence=0.9) == first


def test_the_verdict_reports_the_result_and_the_sensitivity() -> None:
    many = 200
    better = compare(outcomes("-" * many), outcomes("+" * many), confidence=0.95)
    assert better.verdict.startswith("better at 95 % confidence: +100.0 points")
    worse = compare(outcomes("+" * many), outcomes("-" * many), confidence=0.95)
    assert worse.verdict.startswith("worse at 95 % confidence: -100.0 points")
    same = compare(outcomes("+-" * 100), outcomes("+-" * 100), confidence=0.95)
    assert same.verdict.startswith("no difference shown")
    # Nothing changed: the smallest true difference has only changes of one sign, see below.
    assert "a true difference below 3.9 points would usually not have been detected" in same.verdict
    few = compare(outcomes("+-"), outcomes("-+"), confidence=0.95)
    assert few.verdict.endswith("2 prompts are too few to show any difference")


def test_other_prompts_are_refused() -> None:
    with pytest.raises(DataError, match="same prompts") as caught:
        compare(outcomes("++-"), outcomes("++--"), confidence=0.95)
    assert "1 ids" in caught.value.got
    with pytest.raises(DataError, match="too few prompts"):
        compare(outcomes("+??"), outcomes("+++"), confidence=0.95)


def test_detectable_difference_by_hand() -> None:
    # n = 1000, psi = 0.2: (1.959964 sqrt(1000) + 0.841621 sqrt(1000 - 3.841459 + 0.708326))
    # / 1000.708326 = (61.979503 + 26.572613) / 1000.708326 = 0.0884894; times sqrt(0.2) = 0.0395737
    assert detectable_difference(1000, changed=0.2, confidence=0.95) == pytest.approx(
        0.0395737, abs=1e-6
    )
    # n = 200, nothing changed: scale (27.718077 + 11.808857) / 200.708326 = 0.196937, squared.
    assert detectable_difference(200, changed=0.0, confidence=0.95) == pytest.approx(
        0.0387842, abs=1e-6
    )
    assert detectable_difference(2, changed=1.0, confidence=0.95) == 1.0


@given(st.integers(20, 5000), st.floats(0.05, 1.0))
def test_detectable_difference_solves_the_equation_of_its_source(n: int, psi: float) -> None:
    difference = detectable_difference(n, changed=psi, confidence=0.95)
    psi = max(psi, difference)  # if all changes have the same sign
    right = Z_LEVEL * math.sqrt(psi) + Z_POWER * math.sqrt(psi - difference**2)
    assert math.sqrt(n) * difference == pytest.approx(right, rel=1e-5)


def test_the_power_at_the_detectable_difference_is_nominal() -> None:
    # The exact power of McNemar's asymptotic test over all outcomes of 150 pairs of which 30 %
    # change: chance of (gained, lost) under the true difference, summed where |z| > 1.96.
    n, psi = 150, 0.3
    delta = detectable_difference(n, changed=psi, confidence=0.95)
    gain, loss = (psi + delta) / 2, (psi - delta) / 2
    power = 0.0
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            changed = gained + lost
            if changed and abs(gained - lost) > Z_LEVEL * math.sqrt(changed):
                log_chance = (
                    math.lgamma(n + 1)
                    - math.lgamma(gained + 1)
                    - math.lgamma(lost + 1)
                    - math.lgamma(n - changed + 1)
                    + gained * math.log(gain)
                    + lost * math.log(loss)
                    + (n - changed) * math.log(1 - psi)
                )
                power += math.exp(log_chance)
    assert power == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(
    ("num_pairs", "changed", "confidence"), [(0, 0.1, 0.95), (9, 1.1, 0.95), (9, 0.1, 95)]
)
def test_impossible_figures_are_refused(num_pairs: int, changed: float, confidence: float) -> None:
    with pytest.raises(DataError, match="smallest difference"):
        detectable_difference(num_pairs, changed=changed, confidence=confidence)


@pytest.mark.parametrize(
    ("difference", "low", "high", "verdict"),
    [
        (0.1, -0.02, 0.22, "no difference shown"),
        (0.1, 0.02, 0.18, "better"),
        (-0.1, -0.18, -0.02, "worse"),
        (-0.1, -0.22, 0.02, "no difference shown"),
    ],
)
def test_the_verdict_follows_the_interval(
    difference: float, low: float, high: float, verdict: str
) -> None:
    compared = Comparison(
        num_prompts=100,
        num_unscored=0,
        before=0.5,
        after=0.5 + difference,
        difference=difference,
        low=low,
        high=high,
        gained=20,
        lost=10,
        p_value=0.1,
        detectable=0.15,
        confidence=0.95,
    )
    assert compared.verdict.startswith(verdict)
