"""Accuracies of a sweep's points, and a paired test of its settings over their shared seeds."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from nemo_rl_core.history.records import point_label


@dataclass
class SweptSetting:
    """Points that differ in their seed only, with the interval of their mean accuracy."""

    fields: dict[str, Any]
    accuracies: dict[Any, float] = field(default_factory=dict)
    num_failed: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def label(self) -> str:
        """The settings as text."""
        return point_label(self.fields) or "the recipe"

    @property
    def described(self) -> str:
        """One line: settings, mean with interval, number of points."""
        if self.mean is None:
            return f"{self.label}: failed"
        interval = "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        points = f"{len(self.accuracies)} point{'s' if len(self.accuracies) > 1 else ''}"
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"{self.label}: {self.mean:.3f}{interval} ({points}{failed})"


@dataclass(frozen=True)
class SettingComparison:
    """The leading setting against another one, on the seeds that both have.

    `difference` is the mean of the leader's accuracy minus the other's; None without shared seeds.
    """

    other: dict[str, Any]
    num_seeds: int
    difference: float | None
    p_value: float


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep: points (accuracy None for one that failed), grouped into settings.

    The leader has the highest mean of the settings without failed points. It is the best if it is
    better than every other setting by the test; `verdict` is a sentence about that.
    """

    points: list[dict[str, Any]]
    settings: list[SweptSetting]
    leader: dict[str, Any] | None
    comparisons: list[SettingComparison]
    best: dict[str, Any] | None
    verdict: str
    confidence: float


def summarize(
    points: Sequence[tuple[Mapping[str, Any], float | None]], *, apart: str, confidence: float
) -> SweepResult:
    """Groups points (fields and accuracy, None if it failed) by their fields except `apart`.

    The leader is called the best if it beats each other setting in a two-sided paired test over
    the seeds that both have. Since all tests must succeed, multiple comparisons need no correction.
    """
    settings = _settings(points, apart, confidence)
    complete = [each for each in settings if each.mean is not None and not each.num_failed]
    leader = max(complete, key=lambda each: each.mean or 0.0, default=None)
    others = [each for each in settings if each is not leader and each.accuracies]
    pairs = [(other, _compared(leader, other)) for other in others] if leader else []
    comparisons = [comparison for _, comparison in pairs]
    level = 1 - confidence + 1e-9
    is_best = bool(comparisons) and all(
        each.p_value <= level and (each.difference or 0) > 0 for each in comparisons
    )
    return SweepResult(
        points=[{"point": dict(fields), "accuracy": accuracy} for fields, accuracy in points],
        settings=settings,
        leader=leader.fields if leader else None,
        comparisons=comparisons,
        best=leader.fields if leader and is_best else None,
        verdict=_verdict(leader, pairs, is_best, confidence, apart),
        confidence=confidence,
    )


def _settings(
    points: Sequence[tuple[Mapping[str, Any], float | None]], apart: str, confidence: float
) -> list[SweptSetting]:
    groups: dict[str, SweptSetting] = {}
    for fields, accuracy in points:
        setting = {name: value for name, value in fields.items() if name != apart}
        group = groups.setdefault(json.dumps(setting), SweptSetting(setting))
        if accuracy is None:
            group.num_failed += 1
        else:
            group.accuracies[fields.get(apart)] = accuracy
    for group in groups.values():
        values = list(group.accuracies.values())
        group.mean = mean(values) if values else None
        group.low, group.high = mean_interval(values, confidence)
    return list(groups.values())


def _compared(leader: SweptSetting, other: SweptSetting) -> SettingComparison:
    seeds = [seed for seed in leader.accuracies if seed in other.accuracies]
    differences = [leader.accuracies[seed] - other.accuracies[seed] for seed in seeds]
    return SettingComparison(
        other=other.fields,
        num_seeds=len(seeds),
        difference=mean(differences) if seeds else None,
        p_value=sign_flip_p_value(differences),
    )


def _verdict(
    leader: SweptSetting | None,
    pairs: Sequence[tuple[SweptSetting, SettingComparison]],
    is_best: bool,
    confidence: float,
    apart: str,
) -> str:
    if leader is None:
        return "no best setting: points of every setting failed"
    if not pairs:
        return "one setting, nothing to compare"
    sure = f"{100 * confidence:g} % confidence"
    other, worst = max(pairs, key=lambda each: each[1].p_value)
    if is_best:
        return (
            f"best: {leader.label}, better than every other setting at {sure} "
            f"(paired exact test, p at most {worst.p_value:.2g})"
        )
    least = math.ceil(math.log2(2 / (1 - confidence)) - 1e-9)
    seeds = f"{worst.num_seeds} shared {apart}{'s' if worst.num_seeds != 1 else ''}"
    too_few_seeds = f"; {sure} needs at least {least}" if worst.num_seeds < least else ""
    return (
        f"no best setting at {sure}: {leader.label} (mean {leader.mean:.3f}) is not shown to be "
        f"better than {other.label} (mean {other.mean:.3f}), p {worst.p_value:.2g} on "
        f"{seeds}{too_few_seeds}"
    )


def mean_interval(
    values: Sequence[float], confidence: float
) -> tuple[float, float] | tuple[None, None]:
    """Student's interval of a mean accuracy; (None, None) for fewer than two values.

    It is clipped to [0, 1], the range of accuracies, which does not change its coverage.

    Example:
        >>> mean_interval([0.5], 0.95)
        (None, None)
    """
    if len(values) < 2:
        return None, None
    quantile = student_quantile((1 + confidence) / 2, degrees=len(values) - 1)
    half = quantile * stdev(values) / math.sqrt(len(values))
    return max(0.0, mean(values) - half), min(1.0, mean(values) + half)


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Two-sided exact test that paired differences are symmetric about 0; 1 without differences.

    Under the null hypothesis each difference has either sign with probability 1/2: the p-value is
    the share of the `2^n` sign patterns whose sum is at least as far from 0 as the observed one.
    The smallest possible value is `2 / 2^n`. Source: Fisher 1935, "The Design of Experiments",
    section 21.

    Example:
        >>> sign_flip_p_value([0.1, 0.2, 0.1, 0.3, 0.1, 0.2])
        0.03125
    """
    sums = Counter({0.0: 1})
    for difference in differences:
        flipped: Counter[float] = Counter()
        for total, count in sums.items():
            # Rounded, so that equal sums are one entry and the number of entries stays small.
            flipped[round(total + difference, 9)] += count
            flipped[round(total - difference, 9)] += count
        sums = flipped
    observed = abs(sum(differences)) - 1e-6
    return sum(count for total, count in sums.items() if abs(total) >= observed) / sums.total()


def student_quantile(probability: float, *, degrees: int) -> float:
    """Quantile of Student's distribution above its median, by bisection.

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
    """Closed forms for integer degrees: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
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
