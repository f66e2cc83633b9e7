"""Intervals and tests for measured accuracies, and pass@k; plain numbers, no torch."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np

from nemo_rl_core.errors import DataError


class Interval(NamedTuple):
    """A confidence interval, both ends included."""

    lower: float
    upper: float


def wilson_interval(successes: int, total: int, confidence: float) -> Interval:
    """Wilson's score interval for one proportion.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".

    Raises:
        DataError: If there are no trials, or more successes than trials.

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


def exact_interval(successes: int, total: int, confidence: float) -> Interval:
    """Clopper and Pearson's interval for one proportion, from binomial tails.

    Its coverage is at least `confidence`, and it excludes one half exactly when the two-sided
    binomial test rejects one half. Without trials it is the interval from 0 to 1. Source: Clopper
    & Pearson 1934, "The use of confidence or fiducial limits illustrated in the case of the
    binomial".

    Example:
        >>> [round(bound, 4) for bound in exact_interval(8, 10, 0.95)]
        [0.4439, 0.9748]
    """
    tail = (1 - _checked_confidence(confidence)) / 2
    lower = _least_proportion(successes, total, tail)
    return Interval(lower, 1 - _least_proportion(total - successes, total, tail))


def _least_proportion(successes: int, total: int, tail: float) -> float:
    """Returns the proportion at which `successes` or more have the probability `tail`."""
    if successes == 0:
        return 0.0
    factorials = np.concatenate([[0.0], np.log(np.arange(1, total + 1)).cumsum()])
    counts = np.arange(successes, total + 1)
    chosen = factorials[total] - factorials[counts] - factorials[total - counts]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        terms = chosen + counts * math.log(middle) + (total - counts) * math.log1p(-middle)
        low, high = (middle, high) if np.exp(terms).sum() < tail else (low, middle)
    return (low + high) / 2


def paired_interval(gained: int, lost: int, total: int, confidence: float) -> Interval:
    """Interval of `(gained - lost) / total`, the difference of two paired proportions.

    The difference is the share of prompts that changed times `2 g - 1`, with the share `g` of gains
    among the changes. The interval multiplies the bounds of both exact intervals. It therefore
    excludes zero exactly when McNemar's exact test rejects "as many gained as lost" at the same
    confidence, since that test depends only on `g`, and its coverage of a nonzero difference is
    higher than `confidence`.

    Args:
        gained: Prompts that are correct only after.
        lost: Prompts that are correct only before.
        total: All prompts, at least 1.
        confidence: Such as 0.95.

    Example:
        >>> [round(bound, 4) for bound in paired_interval(4, 0, 100, 0.95)]
        [-0.0203, 0.0993]
    """
    changed = exact_interval(gained + lost, total, confidence)
    gains = exact_interval(gained, gained + lost, confidence)
    low, high = 2 * gains.lower - 1, 2 * gains.upper - 1
    return Interval(
        low * (changed.lower if low > 0 else changed.upper),
        high * (changed.upper if high > 0 else changed.lower),
    )


def mcnemar_p_value(gained: int, lost: int) -> float:
    """Two-sided exact test that as many prompts were gained as lost; 1 if nothing changed.

    Only prompts that changed count: under the null hypothesis each is a gain with probability 1/2.
    Source: McNemar 1947, with the binomial distribution instead of its chi-square approximation.

    Example:
        >>> mcnemar_p_value(4, 0)
        0.125
    """
    changed = gained + lost
    tail = sum(math.comb(changed, count) for count in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << changed))


def score_interval(proportion: float, size: float, confidence: float) -> Interval:
    """Wilson's score interval of a mean."""
    z = NormalDist().inv_cdf((1 + _checked_confidence(confidence)) / 2)
    scale = 1 + z**2 / size
    center = (proportion + z**2 / (2 * size)) / scale
    half = z / scale * math.sqrt(proportion * (1 - proportion) / size + (z / (2 * size)) ** 2)
    # At 0 and 1 one bound equals the proportion, up to rounding.
    lower = 0.0 if proportion == 0 else center - half
    upper = 1.0 if proportion == 1 else center + half
    return Interval(lower, upper)


def _checked_confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise DataError(
            "a confidence is a probability",
            expected="0 < confidence < 1",
            got=str(confidence),
            fix="write 0.95 for 95 %",
        )
    return confidence


_ADDED_PROMPTS = 2
"""Prompts of maximum variance that `pass_at_k_interval` adds to the sample."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased probability that one or more of k samples are correct: `1 - C(n-c, k) / C(n, k)`.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1.

    Args:
        n: Number of samples of the prompt.
        c: Number of correct samples.
        k: Number of allowed samples, at most n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise DataError(
            "pass@k cannot be computed from these counts",
            expected="1 <= k <= n and 0 <= c <= n",
            got=f"n {n}, c {c}, k {k}",
            fix="sample at least k completions for each prompt, or use a smaller k",
        )
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def mean_pass_at_k(outcomes: Sequence[Sequence[bool]], *, k: int) -> float:
    """`pass_at_k` averaged over prompts, which may have different numbers of samples, at least k.

    Args:
        outcomes: Correctness of the samples, one list per prompt.
        k: Number of allowed samples.

    Example:
        >>> mean_pass_at_k([[True, False], [False, False]], k=1)
        0.25
    """
    if len(outcomes) == 0:
        raise DataError("pass@k of no prompts", fix="evaluate at least one prompt")
    return fmean(pass_at_k(len(row), sum(map(bool, row)), k) for row in outcomes)


def pass_at_k_interval(
    outcomes: Sequence[Sequence[bool]], *, k: int, confidence: float
) -> Interval:
    """Confidence interval for `mean_pass_at_k`, over the distribution of prompts.

    The samples of a prompt are a cluster, so the interval is Wilson's with the effective number of
    prompts `P p (1 - p) / s^2`, where p is the mean and s^2 the variance of the prompts' estimates.
    If every estimate is 0 or 1, as with k of k samples, that is Wilson's interval for P prompts.
    Few prompts underestimate s^2, so two prompts of the largest possible variance, `p (1 - p)`, are
    added, and the effective number is at most the number of samples. A percentile bootstrap has
    width zero if all prompts are solved: with mostly easy prompts it covers the true value in less
    than half of the cases. Source: Franco et al. 2019,
    https://pmc.ncbi.nlm.nih.gov/articles/PMC6690503.
    """
    mean = mean_pass_at_k(outcomes, k=k)
    estimates = [pass_at_k(len(row), sum(map(bool, row)), k) for row in outcomes]
    size, largest = len(estimates), mean * (1 - mean)
    if largest == 0:
        return score_interval(mean, size, confidence)
    squares = sum((each - mean) ** 2 for each in estimates)
    variance = (squares + _ADDED_PROMPTS * largest) / (size + _ADDED_PROMPTS)
    effective = min(size * largest / variance, sum(map(len, outcomes)))
    return score_interval(mean, effective, confidence)
