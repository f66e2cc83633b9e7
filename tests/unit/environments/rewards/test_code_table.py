"""The grader `code` on a table of verdicts, and on rows of published data sets."""

import json
from collections.abc import Callable

import pytest

from nemo_rl_core.config.single_turn import CodeTests
from nemo_rl_core.data.datasets.formats import recognize
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.rewards.unit_tests import UnitTests
from nemo_rl_core.types import Rollout
from tests.graders.code import CODE_ROWS, code_verdicts
from tests.unit.data.code_rows import HUMAN_EVAL_HELPER, ROWS


@pytest.mark.slow
def test_reference_solutions_score_1_and_other_programs_0(
    namespaces: None, rollout: Callable[..., Rollout]
) -> None:
    right, others = [], []
    for _, record, program in ROWS.values():
        (row,) = recognize([record], where="the data", task="code").rows
        UnitTests.of(row["metadata"]).check_names()
        right.append(rollout(program or row["completion"], metadata=row["metadata"]))
        others.append(rollout("```python\nprint('done')\n```", metadata=row["metadata"]))
    scores = make_scorer(CodeTests()).score(right + others)
    assert scores == [1.0] * len(ROWS) + [0.0] * len(ROWS)


def test_a_program_cannot_redefine_a_helper_of_the_prompt(
    namespaces: None, rollout: Callable[..., Rollout]
) -> None:
    (row,) = recognize([HUMAN_EVAL_HELPER], where="the data", task="code").rows
    forged = "```python\ndef poly(xs, x): return 0\ndef find_zero(xs): return 0\n```"
    assert make_scorer(CodeTests()).score([rollout(forged, metadata=row["metadata"])]) == [0.0]


@pytest.mark.slow
def test_calls_support_lists_of_a_hundred_thousand_numbers(
    namespaces: None, rollout: Callable[..., Rollout]
) -> None:
    numbers = [*range(100_000, 300_000)]
    tests = {"tests": [{"arguments": [numbers], "returns": numbers[::-1]}], "entry_point": "f"}
    scored = [
        rollout(f"def f(x): return x[::{step}]", metadata=json.dumps(tests)) for step in (-1, 1)
    ]
    assert make_scorer(CodeTests()).score(scored) == [1.0, 0.0]


def test_rows_of_the_table_can_be_read() -> None:
    for row in CODE_ROWS:
        UnitTests.of(json.dumps(row.tests)).check_names()


@pytest.mark.thorough
def test_no_verdict_of_the_table_is_wrong(namespaces: None) -> None:
    wrong = [(row, score) for row, score in code_verdicts() if score != row.score]
    assert wrong == []
    assert sum(row.score for row in CODE_ROWS) >= 150
    assert sum(not row.score for row in CODE_ROWS) >= 110
