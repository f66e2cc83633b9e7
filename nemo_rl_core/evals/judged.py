"""Judged completions as rows of an evaluation.

Apart from `rows.py`, so that what only reads an evaluation does not depend on what judges.
"""

from collections.abc import Sequence
from typing import Any

from nemo_rl_core.evals.consensus import ExtractAnswer
from nemo_rl_core.evals.metrics import category_of, is_correct
from nemo_rl_core.types import Rollout


def rows_of(
    rollouts: Sequence[Rollout], mode: str, *, category: str, extract: ExtractAnswer
) -> list[dict[str, Any]]:
    """One row a rollout.

    Args:
        rollouts: Judged completions; those of one prompt in the order they were drawn.
        mode: `greedy` or `sampled`.
        category: As of `EvaluationConfig`.
        extract: Reads the answer that a completion votes for.
    """
    seen: dict[str, int] = {}
    rows = []
    for rollout in rollouts:
        sample = seen[rollout.prompt.id] = seen.get(rollout.prompt.id, -1) + 1
        rows.append(
            {
                "prompt_id": rollout.prompt.id,
                "mode": mode,
                "sample": sample,
                "category": category_of(rollout, category),
                "prompt": rollout.prompt.text,
                "completion": rollout.text,
                "answer": rollout.prompt.answer,
                "extracted": extract(rollout.text),
                "reward": rollout.reward,
                "correct": is_correct(rollout),
                "truncated": rollout.completion.truncated,
                "error": rollout.error,
            }
        )
    return rows
