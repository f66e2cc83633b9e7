"""What preference training changed on held-out pairs: margins, accuracy and a paired verdict."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nemo_rl_core.evals.comparison import Comparison, comparison_of
from nemo_rl_core.evals.statistics import wilson_interval

Row = Mapping[str, Any]
"""`id`, `chosen` and `rejected`."""


def pair_scores(
    start: Sequence[Row], trained: Sequence[Row], *, per_token: bool
) -> list[dict[str, Any]]:
    """Scores both completions of every pair by how much more likely training has made them.

    The score is the implicit reward of DPO without its factor beta: the trained model's logprob of
    the completion less that of the model that training started from, in nats.

    Args:
        start: Logprobs of trained tokens under the model that training started from.
        trained: Logprobs under the trained model, of the same pairs in the same order.
        per_token: Whether logprobs are averaged over a completion's tokens, and not summed.

    Returns:
        One row per pair: `id`, `chosen_score` and `rejected_score`.
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
    """Metrics of scored pairs.

    Returns:
        `num_pairs`, `accuracy` (share of pairs with a positive margin; a tie is wrong) with
        `accuracy_low` and `accuracy_high` (Wilson), and `margin` (mean, in nats).
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
    """Compares the trained model with the one it started from, which prefers neither side.

    A pair counts 1 if training has raised the chosen completion over the rejected one, 0 if it has
    done the opposite, and one half if it has changed nothing, as for the start itself.
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
