"""Intervals and tests for measured accuracies; plain numbers, no torch."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from nemo_rl_core.errors import DataError


class Interval(NamedTuple):
    """A confidence interval, both ends included."""

    lower: float
    upper: float


class PairedDifference(NamedTuple):
    """The mean of `after - before` over prompts, with its confidence interval."""

    difference: float
    lower: float
    upper: float


def wilson_interval(successes: int, total: int, confidence: float) -> Interval:
    """Wilson's score interval for one proportion.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".

    Args:
        successes: Number of successes.
        total: Independent trials, at least 1.
        confidence: Such as 0.95.

    Returns:
        The interval, within [0, 1].

    Raises:
        DataError: When there are no trials, or more successes than trials.

    Example:
        >>> [round(bound, 4) for bound in wilson_interval(8, 10, 0.95)]
        [0.4902, 0.9433]
    """
    if not 0 <= successes <= total or total == 0:
        raise DataError(
            "an interval needs at least one trial and a number of successes within it",
            expected="0 <= successes <= total, total >= 1",
            got=f"successes {successes}, total {total}",
            fix="evaluate at least one prompt",
        )
    return score_interval(successes / total, total, confidence)


def paired_bootstrap(
    before: Sequence[float],
    after: Sequence[float],
    *,
    confidence: float,
    num_resamples: int,
    seed: int,
) -> PairedDifference:
    """The mean improvement over prompts, with a percentile bootstrap interval.

    Prompts are sampled with replacement, and both scores of a prompt stay together, so that its
    difficulty cancels out. Prompts that all improved by the same amount give an interval of no
    width: use enough of them. Source: Efron & Tibshirani 1993, chapter 13.

    Args:
        before: `[P]` score of each prompt, finite, at least two.
        after: `[P]` score of the same prompts, in the same order.
        confidence: Such as 0.95.
        num_resamples: Number of resamples; 10,000 give three stable digits.
        seed: Seed of the resampling: the same seed gives the same interval.

    Returns:
        The difference and its interval.

    Raises:
        DataError: When the scores are not pairs, are fewer than two, or are not finite.
    """
    _check_pairs(before, after, at_least=2)
    tail = (1 - _checked_confidence(confidence)) / 2
    differences = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    if not np.isfinite(differences).all():
        raise DataError(
            "scores to compare must be finite",
            got=f"{int((~np.isfinite(differences)).sum())} pairs that are not",
            fix="leave out prompts whose reward failed, in both evaluations",
        )
    generator = np.random.default_rng(seed)
    size = len(differences)
    # One resample at a time: all of them at once would take [num_resamples, P].
    means = [differences[generator.integers(size, size=size)].mean() for _ in range(num_resamples)]
    lower, upper = np.quantile(means, [tail, 1 - tail])
    return PairedDifference(float(differences.mean()), float(lower), float(upper))


def mcnemar_p_value(before: Sequence[bool], after: Sequence[bool]) -> float:
    """Two-sided exact test that as many prompts were gained as lost.

    Only prompts that changed count: under the null each is a gain with probability 1/2.
    Source: McNemar 1947, with the binomial distribution in place of its chi-square approximation.

    Args:
        before: `[P]` whether each prompt is correct.
        after: `[P]` the same prompts, in the same order.

    Returns:
        The p-value; 1 if nothing changed.

    Raises:
        DataError: When the results are not pairs.
    """
    _check_pairs(before, after, at_least=1)
    gained = sum(bool(new) and not old for old, new in zip(before, after, strict=True))
    lost = sum(bool(old) and not new for old, new in zip(before, after, strict=True))
    changed = gained + lost
    tail = sum(math.comb(changed, count) for count in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << changed))


def score_interval(proportion: float, size: float, confidence: float) -> Interval:
    """The score interval of a mean."""
    z = _two_sided_quantile(confidence)
    scale = 1 + z**2 / size
    center = (proportion + z**2 / (2 * size)) / scale
    half = z / scale * math.sqrt(proportion * (1 - proportion) / size + (z / (2 * size)) ** 2)
    # At 0 and 1 one bound equals the proportion, up to rounding.
    lower = 0.0 if proportion == 0 else center - half
    upper = 1.0 if proportion == 1 else center + half
    return Interval(lower, upper)


def _two_sided_quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + _checked_confidence(confidence)) / 2)


def _checked_confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise DataError(
            "a confidence is a probability",
            expected="0 < confidence < 1",
            got=str(confidence),
            fix="write 0.95 for 95 %",
        )
    return confidence


def _check_pairs(before: Sequence[float], after: Sequence[float], *, at_least: int) -> None:
    if len(before) != len(after) or len(before) < at_least:
        raise DataError(
            "a paired comparison needs the same prompts before and after",
            expected=f"equally many scores, at least {at_least}",
            got=f"{len(before)} before, {len(after)} after",
            fix="evaluate both checkpoints on the same validation rows",
        )
