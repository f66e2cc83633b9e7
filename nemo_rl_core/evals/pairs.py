"""Margins, accuracy and a paired verdict on held-out preference pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nemo_rl_core.evals.comparison import Comparison, comparison_of
from nemo_rl_core.evals.statistics import wilson_interval

Row = Mapping[str, Any]
"""Row with the keys `id`, `chosen` and `rejected`."""


def pair_scores(
    start: Sequence[Row], trained: Sequence[Row], *, per_token: bool
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


def pair_metrics(rows: Sequence[Row], *, confidence: float) -> dict[str, float]:
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


def compare_pairs(rows: Sequence[Row], *, confidence: float) -> Comparison:
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


def _margins(rows: Sequence[Row]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.asarray([row["chosen_score"] - row["rejected_score"] for row in rows])
