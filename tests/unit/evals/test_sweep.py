"""Means over seeds and their intervals, against hand computed ones."""

import math

import pytest

from nemo_rl_core.evals.sweep import describe_point, group_by_settings, student_quantile


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    # A table of Student's distribution.
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042)],
)
def test_quantiles_are_those_of_the_table(degrees: int, quantile: float) -> None:
    assert student_quantile(0.975, degrees=degrees) == pytest.approx(quantile, abs=5e-4)


def test_settings_are_gathered_over_seeds_in_their_order() -> None:
    figures = [
        ({"seed": 0, "rate": 2}, 0.5),
        ({"seed": 0, "rate": 1}, 0.25),
        ({"seed": 1, "rate": 2}, 0.7),
        ({"seed": 2, "rate": 2}, 0.6),
    ]
    first, second = group_by_settings(figures, apart="seed", confidence=0.95)
    # The deviation of 0.5, 0.7 and 0.6 is 0.1.
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert (first["rate"], first["num_points"], first["mean"]) == (2, 3, pytest.approx(0.6))
    assert first["low"] == pytest.approx(0.6 - half, abs=1e-4)
    assert first["high"] == pytest.approx(0.6 + half, abs=1e-4)
    assert second == {"rate": 1, "num_points": 1, "mean": 0.25, "low": None, "high": None}
    assert describe_point(second) == "rate 1 0.250"
    assert describe_point(first) == f"rate 2 0.600 [{0.6 - half:.3f}, {0.6 + half:.3f}]"
