"""Hostile programs that try to get the reward of unit tests that they do not pass."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.single_turn import CodeTests
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.needs import refuse_incomplete_rows
from nemo_rl_core.environments.rewards import code_checker
from nemo_rl_core.environments.rewards.code_checker.names import package_folders
from nemo_rl_core.environments.rewards.code_checker.preamble import preamble
from nemo_rl_core.environments.rewards.unit_tests import UnitTests
from nemo_rl_core.environments.sandbox import Limits, Sandbox
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Prompt, Rollout
from tests.unit.environments.rewards.forged_programs import ACCEPTED, FORGED, REFUSED
from tests.unit.environments.rewards.hostile_programs import ROWS, Row

ENDLESS = {"returns what equals the sentinel", "a recursion limit taken away"}
"""Programs that reach the limits."""
Case = tuple[Row, str, str]
ALL = [(row, name, program) for row in ROWS for name, program in sorted(row.hostile.items())]
HOSTILE = [case for case in ALL if case[1] not in ENDLESS]
RIGHT = [(row, "right", row.right) for row in ROWS if row.right]

# Runs both halves of the checker in separate processes, one case after another. Forking them takes
# a twentieth of the time of two sandboxes per case.
FARM = """
import json, os, sys
from nemo_rl_core.environments.rewards.code_checker import checker, program

def start(main, folder, *streams):
    child = os.fork()
    if child:
        return child
    os.setsid()
    os.chdir(folder)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    os.closerange(3, 64)
    main()
    sys.exit()

verdicts = []
for n in range(int(open('count').read())):
    requests, replies, report = os.pipe(), os.pipe(), os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    answering = start(program.main, f'case{n}', requests[0], replies[1], null)
    checking = start(checker.main, f'case{n}', replies[0], requests[1], report[1])
    for each in (*requests, *replies, report[1], null):
        os.close(each)
    with os.fdopen(report[0]) as file:
        verdicts.append(file.read())
    os.waitpid(checking, 0)
    os.kill(answering, 9)
    os.waitpid(answering, 0)
print(json.dumps(verdicts))
"""


def _verdicts(cases: list[Case]) -> list[str]:
    """Returns the checker's report of each case."""
    folder = "nemo_rl_core/environments/rewards/code_checker"
    assert code_checker.__file__ is not None
    files = {
        f"{folder}/{file.name}": file.read_text()
        for file in Path(code_checker.__file__).parent.glob("*.py")
    }
    files |= {"main.py": FARM, "count": str(len(cases))}
    for n, (row, _, program) in enumerate(cases):
        files[f"case{n}/program.py"] = program
        files[f"case{n}/preamble.py"] = preamble(program)
        stored = {"setup": "", "tests": [row.test], "declared": row.name.split()}
        files[f"case{n}/tests.json"] = json.dumps(stored)
    limits = Limits(cpu_seconds=10, wall_seconds=500, num_processes=32)
    ended = Sandbox(limits).run(files, readable=package_folders())
    assert ended.succeeded, ended
    verdicts: list[str] = json.loads(ended.stdout)
    return verdicts


def _check(right: list[Case], wrong: list[Case]) -> None:
    """Checks all verdicts: a wrong program can neither pass a test nor break its row."""
    expected = ["[0, true]\n"] * len(right) + ["[0, false]\n"] * len(wrong)
    verdicts = zip(right + wrong, _verdicts(right + wrong), expected, strict=True)
    assert [(n, row.test, got) for (row, n, _), got, due in verdicts if got != due] == []


@pytest.mark.slow
def test_no_hostile_program_passes(namespaces: None) -> None:
    assert len(HOSTILE) >= 65
    _check(RIGHT, HOSTILE)


@pytest.mark.slow
def test_no_forged_program_passes(namespaces: None) -> None:
    forged = [(row, name, program) for row in FORGED for name, program in row.hostile.items()]
    assert len(forged) >= 60
    _check([(row, "right", row.right) for row in (*FORGED, *ACCEPTED)], forged)


@pytest.mark.parametrize(("test", "name"), REFUSED.items())
def test_a_name_that_nothing_defines_is_refused_when_rows_are_read(test: str, name: str) -> None:
    metadata = json.dumps({"tests": ["assert f(1) == 2", test], "entry_point": "f"})
    rows = [Prompt(str(n), "Write f.", (), "", "code", metadata) for n in range(2)]
    with pytest.raises(DataError) as caught:
        refuse_incomplete_rows(rows, CodeTests(), name="train")
    assert "2 of 2 rows of the train data set cannot be scored" in str(caught.value)
    assert f"row 1: test 1: it uses {name}, which the row neither defines nor" in str(caught.value)
    assert f'"entry_point": ["f", "{name}"]' in str(caught.value)


def test_a_row_that_declares_nothing_tests_the_names_that_it_calls_or_catches() -> None:
    tests = ["assert f(1) == 2", "try:\n    f(0)\nexcept BadError:\n    pass"]
    row = Prompt("0", "Write f.", (), "", "code", json.dumps({"tests": tests}))
    refuse_incomplete_rows([row], CodeTests(), name="train")
    assert UnitTests.of(row.metadata).declared == ("f", "BadError")
    row = replace(row, metadata=json.dumps({"tests": ["assert f(1) == EXPECTED"]}))
    with pytest.raises(DataError, match='add "entry_point": \\["f", "EXPECTED"\\] to the row'):
        refuse_incomplete_rows([row], CodeTests(), name="train")
    row = replace(row, metadata=json.dumps({"tests": ["assert f(4) == gcd(4, 6)"]}))
    with pytest.raises(DataError, match="it uses gcd, which"):
        refuse_incomplete_rows([row], CodeTests(), name="train")


@pytest.mark.thorough
def test_no_hostile_program_passes_in_two_sandboxes(
    namespaces: None, rollout: Callable[..., Rollout]
) -> None:
    scorer = make_scorer(CodeTests(cpu_seconds=2, wall_seconds=60))
    rollouts: list[Any] = [
        rollout(
            program, metadata=json.dumps({"tests": [row.test], "entry_point": row.name.split()})
        )
        for row, _, program in RIGHT + ALL
    ]
    assert scorer.score(rollouts) == [1.0] * len(RIGHT) + [0.0] * len(ALL)
