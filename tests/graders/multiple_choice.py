"""The table of answers, completions and right verdicts of the grader `multiple_choice`."""

import json
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_core.environments.rewards.multiple_choice import MultipleChoiceScorer
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Completion, Prompt, Rollout
from tests.graders.tables import Verdict

CHOICE_ROWS = [
    Verdict(*json.loads(line))
    for line in (Path(__file__).parent / "multiple_choice.jsonl").read_text("utf-8").splitlines()
]
KNOWN_CHOICE_FAULTS = {
    row
    for row in CHOICE_ROWS
    if row.score == 1
    and row.completion.startswith(
        (
            "Looking at the options",
            "The statement which is NOT true",
            "The correct answer is: **(B) 1/2**. Wait, that seems right",
            "A. Paris is correct.\nB.",
            "- A: wrong",
            "Answer: C.\n\nNo, it cannot be A",
            "B it is",
            "Easy: B",
            "The answer is, of course",
            "A ❌",
            "Thus, C: 12",
        )
    )
}
"""Right completions that get 0."""


def choice_verdicts() -> Iterator[tuple[Verdict, float | RewardError]]:
    """Yields each row with the score that it gets."""
    completion = Completion((1,), (0.0,), truncated=False)
    rollouts = [
        Rollout(Prompt("1", "?", (1,), row.answer, ""), completion, row.completion)
        for row in CHOICE_ROWS
    ]
    scores = MultipleChoiceScorer(num_choices=4).score(rollouts)
    yield from zip(CHOICE_ROWS, scores, strict=True)
