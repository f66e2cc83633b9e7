"""Metrics of a sweep's points, aggregated over seeds."""

import json
import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any


def group_by_settings(
    figures: Sequence[tuple[Mapping[str, Any], float]], *, apart: str, confidence: float
) -> list[dict[str, Any]]:
    """Aggregates points by setting; rows have its fields, `num_points`, `mean`, `low` and `high`.

    The interval is Student's, of the mean over the repetitions of a setting. For a single point
    `low` and `high` are None.

    Args:
        figures: The fields of each point, and its metric.
        apart: The field that distinguishes repetitions, such as the seed.
        confidence: Level of the interval.

    Example:
        >>> group_by_settings([({"rate": 1, "seed": 0}, 0.5)], apart="seed", confidence=0.95)
        [{'rate': 1, 'num_points': 1, 'mean': 0.5, 'low': None, 'high': None}]
    """
    groups: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for fields, figure in figures:
        setting = {name: value for name, value in fields.items() if name != apart}
        groups.setdefault(json.dumps(setting), (setting, []))[1].append(figure)
    rows = []
    for setting, values in groups.values():
        half = _half_width(values, confidence)
        middle = mean(values)
        low, high = (None, None) if half is None else (middle - half, middle + half)
        rows.append(
            {**setting, "num_points": len(values), "mean": middle, "low": low, "high": high}
        )
    return rows


def describe_point(row: Mapping[str, Any]) -> str:
    """Formats a row of `group_by_settings`."""
    setting = [f"{name} {value}" for name, value in row.items() if name not in _FIGURES]
    interval = "" if row["low"] is None else f" [{row['low']:.3f}, {row['high']:.3f}]"
    return " ".join([*setting, f"{row['mean']:.3f}{interval}"])


_FIGURES = ("num_points", "mean", "low", "high")


def _half_width(values: Sequence[float], confidence: float) -> float | None:
    if len(values) < 2:
        return None
    quantile = student_quantile((1 + confidence) / 2, degrees=len(values) - 1)
    return quantile * stdev(values) / math.sqrt(len(values))


def student_quantile(probability: float, *, degrees: int) -> float:
    """The quantile of Student's distribution above its median, by bisection.

    Args:
        probability: Between 0.5 and 1.
        degrees: Degrees of freedom, at least 1.

    Example:
        >>> round(student_quantile(0.975, degrees=2), 3)
        4.303
    """
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(value: float, degrees: int) -> float:
    """The closed forms for whole degrees: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(value / math.sqrt(degrees))
    cosine = math.cos(angle)
    term = total = cosine if degrees % 2 else 1.0
    for step in range(2 if degrees % 2 else 1, degrees - 1, 2):
        term *= cosine**2 * step / (step + 1)
        total += term
    if degrees % 2 == 0:
        return 0.5 + math.sin(angle) * total / 2
    inner = math.sin(angle) * total if degrees > 1 else 0.0
    return 0.5 + (angle + inner) / math.pi
