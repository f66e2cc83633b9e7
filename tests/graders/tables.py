"""Tables of the graders: verdicts of `math`, and rows with their reference solutions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nemo_rl_core.environments.rewards.math import MathScorer
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Completion, Prompt, Rollout


class Verdict(NamedTuple):
    """A completion and its right score.

    Attributes:
        kind: Name of the group of examples.
        answer: Reference answer.
        completion: A completion.
        score: 1 if it is right, else 0.
    """

    kind: str
    answer: str
    completion: str
    score: float


ROWS = [
    Verdict(*json.loads(line))
    for line in (Path(__file__).parent / "math.jsonl").read_text("utf-8").splitlines()
]
SOLUTIONS = [
    json.loads(line)
    for line in (Path(__file__).parent / "solutions.jsonl").read_text("utf-8").splitlines()
]
"""Rows of published formats, each with the name of its format."""
KNOWN_FAULTS = {
    row
    for row in ROWS
    if row.answer in (r"e^{i\pi}", r"\{x : x>3\}")
    or row.completion == "The answer is twelve, that is 12."
}
"""Right completions that get 0."""


def verdicts() -> Iterator[tuple[Verdict, float | RewardError]]:
    """Yields each row with the score that it gets."""
    completion = Completion((1,), (0.0,), truncated=False)
    rollouts = [
        Rollout(Prompt("1", "?", (1,), row.answer, ""), completion, row.completion) for row in ROWS
    ]
    scorer = MathScorer()
    try:
        yield from zip(ROWS, scorer.score(rollouts), strict=True)
    finally:
        scorer.close()
