"""pass@k: the probability that at least one of k completions is correct, and its interval."""

import math
from collections.abc import Sequence
from statistics import fmean

from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.statistics import Interval, score_interval

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
