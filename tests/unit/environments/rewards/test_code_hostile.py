"""Programs that want the reward of unit tests that they do not pass."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.single_turn import CodeTests
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.rewards import code_checker
from nemo_rl_core.environments.sandbox import Limits, Sandbox
from nemo_rl_core.types import Rollout
from tests.unit.environments.rewards.hostile_programs import ROWS

ENDLESS = {"returns what equals the sentinel", "a recursion limit taken away"}
"""Those that run into the limits."""
ALL = [(row.test, name, program) for row in ROWS for name, program in sorted(row.hostile.items())]
HOSTILE = [case for case in ALL if case[1] not in ENDLESS]
RIGHT = [(row.test, "right", row.right) for row in ROWS if row.right]

# Both halves of the checker, each in a process of its own, for one case after another. They are
# forked: that costs a twentieth of two sandboxes a case.
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


def _verdicts(cases: list[tuple[str, str, str]]) -> list[str]:
    """What the checker reports of each case."""
    folder = "nemo_rl_core/environments/rewards/code_checker"
    assert code_checker.__file__ is not None
    files = {
        f"{folder}/{file.name}": file.read_text()
        for file in Path(code_checker.__file__).parent.glob("*.py")
    }
    files |= {"main.py": FARM, "count": str(len(cases))}
    for n, (test, _, program) in enumerate(cases):
        files[f"case{n}/program.py"] = program
        files[f"case{n}/tests.json"] = json.dumps({"setup": "", "tests": [test]})
    limits = Limits(cpu_seconds=10, wall_seconds=500, num_processes=32)
    ended = Sandbox(limits).run(files)
    assert ended.succeeded, ended
    found: list[str] = json.loads(ended.stdout)
    return found


def test_no_hostile_program_passes(namespaces: None) -> None:
    assert len(HOSTILE) >= 65
    said = _verdicts(RIGHT + HOSTILE)
    rights, forged = said[: len(RIGHT)], said[len(RIGHT) :]
    assert [case for case, line in zip(RIGHT, rights, strict=True) if line != "[0, true]\n"] == []
    # No more and no less than a test that failed: a program can neither pass it nor break the row.
    assert [
        (name, test, line)
        for (test, name, _), line in zip(HOSTILE, forged, strict=True)
        if line != "[0, false]\n"
    ] == []


@pytest.mark.thorough
def test_nor_in_two_sandboxes(namespaces: None, rollout: Callable[..., Rollout]) -> None:
    scorer = make_scorer(CodeTests(cpu_seconds=2, wall_seconds=60))
    rollouts: list[Any] = [
        rollout(program, metadata=json.dumps({"tests": [test]})) for test, _, program in RIGHT + ALL
    ]
    assert scorer.score(rollouts) == [1.0] * len(RIGHT) + [0.0] * len(ALL)
