"""Two checkpoints on the same prompts: how much better, how sure, and what could have been seen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.statistics import mcnemar_p_value, paired_bootstrap

NUM_RESAMPLES = 10_000
"""Fixes the third digit of an interval's ends."""

POWER = 0.8
"""The chance with which a difference should be found, to count as one the sample could show."""

Outcomes = Mapping[str, bool | None]
"""Whether each prompt, by its id, was answered right; None where it has no reward."""


@dataclass(frozen=True)
class Comparison:
    """What changed between two evaluations of the same prompts.

    Attributes:
        num_prompts: Prompts that both evaluations have scored; all figures are about these.
        num_unscored: Prompts left out, because one of the two has no reward for them.
        before: Share of right answers of the first.
        after: Share of right answers of the second.
        difference: `after - before`.
        low: Lower bound of the paired bootstrap's interval of the difference.
        high: Upper bound.
        gained: Prompts that only the second answers right.
        lost: Prompts that only the first answers right.
        p_value: Of McNemar's exact test that as many were gained as lost.
        detectable: The smallest difference that so many prompts would have shown.
        confidence: Of the interval; its complement is the level at which `detectable` is tested.
    """

    num_prompts: int
    num_unscored: int
    before: float
    after: float
    difference: float
    low: float
    high: float
    gained: int
    lost: int
    p_value: float
    detectable: float
    confidence: float

    @property
    def measured(self) -> str:
        """The difference and its interval in points, such as `+4.0 points [+1.2, +6.8]`."""
        return (
            f"{100 * self.difference:+.1f} points [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        )

    @property
    def verdict(self) -> str:
        """One sentence: better, worse, or no difference shown, and what could have been shown."""
        sure = f"{100 * self.confidence:g} % confidence"
        if self.low > 0:
            said = f"better at {sure}"
        elif self.high < 0:
            said = f"worse at {sure}"
        else:
            said = f"no difference shown at {sure}"
        return f"{said}: {self.measured} on {self.num_prompts} prompts; {self.sensitivity}"

    @property
    def sensitivity(self) -> str:
        """What a sample of this size can show, in plain words."""
        if self.detectable >= 1:
            return f"{self.num_prompts} prompts are too few to show any difference"
        return (
            f"a true difference below {100 * self.detectable:.1f} points would usually have gone "
            "unseen"
        )


def compare(before: Outcomes, after: Outcomes, *, confidence: float, seed: int) -> Comparison:
    """Compares two evaluations prompt by prompt.

    Args:
        before: Of the first checkpoint.
        after: Of the second, on the same prompts; their order does not matter.
        confidence: Such as 0.95.
        seed: Of the bootstrap's draws.

    Raises:
        DataError: If the prompts differ, or fewer than two were scored in both.
    """
    scored = _scored_in_both(before, after)
    old = [bool(before[key]) for key in scored]
    new = [bool(after[key]) for key in scored]
    interval = paired_bootstrap(
        old, new, confidence=confidence, num_resamples=NUM_RESAMPLES, seed=seed
    )
    gained = sum(b and not a for a, b in zip(old, new, strict=True))
    lost = sum(a and not b for a, b in zip(old, new, strict=True))
    return Comparison(
        num_prompts=len(scored),
        num_unscored=len(before) - len(scored),
        before=sum(old) / len(scored),
        after=sum(new) / len(scored),
        difference=interval.difference,
        low=interval.lower,
        high=interval.upper,
        gained=gained,
        lost=lost,
        p_value=mcnemar_p_value(old, new),
        detectable=detectable_difference(
            len(scored), changed=(gained + lost) / len(scored), confidence=confidence
        ),
        confidence=confidence,
    )


def detectable_difference(
    num_pairs: int, *, changed: float, confidence: float, power: float = POWER
) -> float:
    """The smallest difference of two paired proportions that a test would find with `power`.

    With `n` pairs of which a share `psi` changes at all, a two-sided McNemar test finds a true
    difference `d` with the given power when `sqrt(n) d = z_a sqrt(psi) + z_b sqrt(psi - d^2)`,
    solved here for `d`. Source: Connor 1987, "Sample size for testing differences in proportions
    for the paired-sample design", Biometrics 43.

    A difference cannot exceed the share that changes. Where the solution does, because little
    changed, the answer is the difference at which all changes go the same way (`psi = d`).

    Args:
        num_pairs: `n`, at least 1.
        changed: `psi`, the share of prompts whose outcome differs, as seen in the sample.
        confidence: One less the level of the test.
        power: The chance to find a difference of this size.

    Returns:
        Between 0 and 1; 1 also where no difference could be found.

    Raises:
        DataError: If an argument is outside its range.

    Example:
        >>> round(detectable_difference(1000, changed=0.2, confidence=0.95), 4)
        0.0396
    """
    if num_pairs < 1 or not (0 <= changed <= 1 and 0 < confidence < 1 and 0.5 <= power < 1):
        raise DataError(
            "no smallest difference follows from these figures",
            expected="at least one pair, a changed share in [0, 1], a confidence, a power >= 0.5",
            got=f"{num_pairs} pairs, changed {changed}, confidence {confidence}, power {power}",
            fix="compare evaluations of at least one prompt, and write 0.95 for 95 %",
        )
    normal = NormalDist()
    z_level, z_power = normal.inv_cdf((1 + confidence) / 2), normal.inv_cdf(power)
    inner = max(0.0, num_pairs - z_level**2 + z_power**2)
    scale = (z_level * math.sqrt(num_pairs) + z_power * math.sqrt(inner)) / (num_pairs + z_power**2)
    # The equation is `d = scale * sqrt(psi)`, and with `psi = d` it is `d = scale^2`.
    return min(1.0, scale * max(math.sqrt(changed), scale))


def _scored_in_both(before: Outcomes, after: Outcomes) -> list[str]:
    if before.keys() != after.keys():
        only = sorted(before.keys() ^ after.keys())
        raise DataError(
            "two evaluations can only be compared on the same prompts",
            expected="the same prompt ids in both",
            got=f"{len(only)} ids in one of them only, such as {only[0]!r}",
            fix="evaluate both checkpoints on the same rows",
        )
    scored = sorted(key for key in before if before[key] is not None and after[key] is not None)
    if len(scored) < 2:
        raise DataError(
            "too few prompts were scored in both evaluations",
            expected="at least 2",
            got=f"{len(scored)} of {len(before)}",
            fix="ask more prompts; the column error of rows.parquet says why some have no reward",
        )
    return scored
