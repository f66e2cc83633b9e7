"""The table of tests, completions and right verdicts of the grader `code`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl_core.config.single_turn import CodeTests
from nemo_rl_core.environments.rewards.code import CodeScorer
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Completion, Prompt, Rollout


class CodeVerdict(NamedTuple):
    """A completion and its right score.

    Attributes:
        kind: Name of the group of examples.
        tests: Metadata of the row.
        completion: A completion.
        score: 1 if its program is right, else 0.
    """

    kind: str
    tests: dict[str, Any]
    completion: str
    score: float


CODE_ROWS = [
    CodeVerdict(*json.loads(line))
    for line in (Path(__file__).parent / "code.jsonl").read_text("utf-8").splitlines()
]


def code_verdicts() -> Iterator[tuple[CodeVerdict, float | RewardError]]:
    """Yields each row with the score that it gets."""
    completion = Completion((1,), (0.0,), truncated=False)
    rollouts = [
        Rollout(Prompt("1", "?", (1,), "", "", json.dumps(row.tests)), completion, row.completion)
        for row in CODE_ROWS
    ]
    scorer = CodeScorer(CodeTests(cpu_seconds=2, wall_seconds=60))
    yield from zip(CODE_ROWS, scorer.score(rollouts), strict=True)
