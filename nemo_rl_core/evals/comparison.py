"""Paired comparison of two checkpoints, on prompts or on held-out preference pairs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.statistics import mcnemar_p_value, paired_interval, wilson_interval

POWER = 0.8
"""Statistical power at which a difference counts as detectable."""

Outcomes = Mapping[str, bool | None]
"""Correctness by prompt id; None for prompts that could not be scored."""


@dataclass(frozen=True)
class Comparison:
    """The difference between two evaluations, over the `num_prompts` scored in both.

    Attributes:
        num_unscored: Prompts left out because one evaluation could not score them.
        before: Share of correct answers in the first evaluation.
        after: Share of correct answers in the second evaluation.
        low: Lower bound of the difference's interval, `statistics.paired_interval`; it is above 0
            exactly where `p_value` is below `1 - confidence` and more prompts were gained.
        gained: Prompts that are correct only in the second evaluation.
        p_value: P-value of McNemar's exact test; null hypothesis: as many gained as lost.
        detectable: The smallest difference detectable with this number of prompts.
        confidence: Level of the interval; the test and `detectable` use its complement.
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
        """One sentence: better, worse, or no difference shown, and the detectable difference."""
        sure = f"{100 * self.confidence:g} % confidence"
        if self.low > 0:
            verdict = f"better at {sure}"
        elif self.high < 0:
            verdict = f"worse at {sure}"
        else:
            verdict = f"no difference shown at {sure}"
        return f"{verdict}: {self.measured} on {self.num_prompts} prompts; {self.sensitivity}"

    @property
    def sensitivity(self) -> str:
        """A sentence on the difference that a sample of this size can detect."""
        if self.detectable >= 1:
            return f"{self.num_prompts} prompts are too few to show any difference"
        return (
            f"a true difference below {100 * self.detectable:.1f} points would usually not have "
            "been detected"
        )


def compare(before: Outcomes, after: Outcomes, *, confidence: float) -> Comparison:
    """Compares two evaluations of the same prompts, in any order.

    Raises:
        DataError: If the prompts differ, or fewer than two were scored in both.
    """
    scored = _scored_in_both(before, after)
    old = [bool(before[key]) for key in scored]
    new = [bool(after[key]) for key in scored]
    gained = sum(b and not a for a, b in zip(old, new, strict=True))
    lost = sum(a and not b for a, b in zip(old, new, strict=True))
    return comparison_of(
        gained=gained,
        lost=lost,
        total=len(scored),
        before=sum(old) / len(scored),
        num_unscored=len(before) - len(scored),
        confidence=confidence,
    )


def comparison_of(
    *,
    gained: int,
    lost: int,
    total: int,
    before: float,
    confidence: float,
    weight: float = 1.0,
    num_unscored: int = 0,
) -> Comparison:
    """Returns the comparison with these counts.

    Args:
        gained: Prompts or pairs that are better in the second evaluation.
        lost: Those that are worse.
        total: All that were scored in both.
        before: The mean score of the first evaluation.
        confidence: Such as 0.95.
        weight: The change of a score that is gained or lost.
        num_unscored: Those that were left out.
    """
    interval = paired_interval(gained, lost, total, confidence)
    difference = weight * (gained - lost) / total
    smallest = detectable_difference(total, changed=(gained + lost) / total, confidence=confidence)
    return Comparison(
        num_prompts=total,
        num_unscored=num_unscored,
        before=before,
        after=before + difference,
        difference=difference,
        low=weight * interval.lower,
        high=weight * interval.upper,
        gained=gained,
        lost=lost,
        p_value=mcnemar_p_value(gained, lost),
        detectable=smallest if smallest >= 1 else weight * smallest,
        confidence=confidence,
    )


def detectable_difference(num_pairs: int, *, changed: float, confidence: float) -> float:
    """The smallest difference of two paired proportions that a test would find with `POWER`.

    With `n` pairs of which a share `psi` changes at all, a two-sided McNemar test finds a true
    difference `d` with the given power when `sqrt(n) d = z_a sqrt(psi) + z_b sqrt(psi - d^2)`,
    which is solved for `d`. Source: Connor 1987, "Sample size for testing differences in
    proportions for the paired-sample design", Biometrics 43.

    A difference cannot exceed the share that changes. If the solution does, the result is the
    difference at which all changes have the same sign (`psi = d`); 1 if none can be found.

    Args:
        num_pairs: `n`, at least 1.
        changed: `psi`, the share of prompts whose outcome differs, as seen in the sample.
        confidence: One minus the level of the test.

    Example:
        >>> round(detectable_difference(1000, changed=0.2, confidence=0.95), 4)
        0.0396
    """
    if num_pairs < 1 or not (0 <= changed <= 1 and 0 < confidence < 1):
        raise DataError(
            "no smallest difference follows from these values",
            expected="at least one pair, a changed share in [0, 1], a confidence",
            got=f"{num_pairs} pairs, changed {changed}, confidence {confidence}",
            fix="compare evaluations of at least one prompt, and write 0.95 for 95 %",
        )
    normal = NormalDist()
    z_level, z_power = normal.inv_cdf((1 + confidence) / 2), normal.inv_cdf(POWER)
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
            fix="use more prompts; see the column error of rows.parquet for missing rewards",
        )
    return scored


PairRow = Mapping[str, Any]
"""Row with the keys `id`, `chosen` and `rejected`."""


def pair_scores(
    start: Sequence[PairRow], trained: Sequence[PairRow], *, per_token: bool
) -> list[dict[str, Any]]:
    """Scores both completions of every pair by the change of their logprob in training.

    The score is the implicit reward of DPO without its factor beta: the completion's logprob under
    the trained model minus that under the initial model, in nats, or its mean `per_token`.
    """
    reduce = np.mean if per_token else np.sum
    rows = []
    for old, new in zip(start, trained, strict=True):
        assert old["id"] == new["id"], "logprobs are stored in the order of the pairs"
        row: dict[str, Any] = {"id": old["id"]}
        for side in ("chosen", "rejected"):
            change = np.asarray(new[side], np.float64) - np.asarray(old[side], np.float64)
            row[f"{side}_score"] = float(reduce(change))
        rows.append(row)
    return rows


def pair_metrics(rows: Sequence[PairRow], *, confidence: float) -> dict[str, float]:
    """Returns `num_pairs`, `margin` (mean, in nats) and `accuracy` with Wilson's interval.

    Accuracy is the share of pairs with a positive margin; a tie is wrong.
    """
    margins = _margins(rows)
    num_right = int((margins > 0).sum())
    low, high = wilson_interval(num_right, len(rows), confidence)
    return {
        "num_pairs": float(len(rows)),
        "accuracy": num_right / len(rows),
        "accuracy_low": low,
        "accuracy_high": high,
        "margin": float(margins.mean()),
    }


def compare_pairs(rows: Sequence[PairRow], *, confidence: float) -> Comparison:
    """Compares the trained model with the initial model, which prefers neither side.

    A pair counts 1 if training has raised the chosen completion relative to the rejected one, 0 for
    the opposite, and one half for no change.
    """
    margins = _margins(rows)
    return comparison_of(
        gained=int((margins > 0).sum()),
        lost=int((margins < 0).sum()),
        total=len(rows),
        before=0.5,
        weight=0.5,
        confidence=confidence,
    )


def _margins(rows: Sequence[PairRow]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.asarray([row["chosen_score"] - row["rejected_score"] for row in rows])
