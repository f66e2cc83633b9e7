"""Completions that are programs, scored by the unit tests of their row.

A row's metadata says how. Either pieces of Python that call what the program defines:

    {"setup": "import math", "entry_point": ["add", "pi"],
     "tests": ["assert add(1, 2) == 3", "assert math.isclose(pi(), 3.14)"]}

or inputs and outputs of the whole program, where white space at the ends of lines does not count:

    {"tests": [{"stdin": "1 2\\n", "stdout": "3\\n"}]}

`setup` is optional, and runs before each piece. `entry_point` names what the program defines: one
name or a list. All other names of a piece are its own, those of its setup, Python's, or a library's
(`code_checker.names`): a program cannot define them. A row with another name is refused when it is
read.

Tests can import the packages that are installed here, such as numpy; programs have the standard
library. Data goes back and forth as plain data (numbers, text, bytes, lists, tuples, sets, dicts,
None), so that a program changes no argument of a test's; of anything else, methods can be called.
Between two calls, a name or an attribute has one value.

An exception of the program fails a test that does not catch it itself, even if Python hides it (an
IndexError that ends a loop). StopIteration and StopAsyncIteration reach the test as RuntimeError.
The limits hold for all pieces of a row together, and for each exchange.

A row is broken, and has no score, when the verdict on one of its pieces is the same for every
program: the piece or its setup cannot be compiled, a name is not defined, the setup raises, an
argument cannot be sent, or the piece ends (it passes, raises, exits, or reaches the limits) before
it has asked the program for anything. A piece that first asks, and then fails whatever the reply,
is not recognised.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from nemo_rl_core.config.single_turn import CodeTests
from nemo_rl_core.environments.interfaces import Scorer, attempt
from nemo_rl_core.environments.rewards.code_checker.names import package_folders
from nemo_rl_core.environments.rewards.unit_tests import (
    InputOutputTest,
    UnitTests,
    extract_program,
    lines_of,
    stored_tests,
)
from nemo_rl_core.environments.sandbox import Finished, Limits, Sandbox
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

_TEST_MEMORY_MIB = 512
_FOLDER = "nemo_rl_core/environments/rewards/code_checker"


class CodeScorer(Scorer):
    """The fraction of a row's unit tests that a completion's program passes, or all or nothing.

    A program that is wrong, crashes, or passes its limits earns 0 for the tests that it does not
    pass. A row whose tests cannot be run, and a sandbox that does not start, are errors. The
    program and the tests run in two sandboxes: neither their verdict nor the expected values are
    ever in the program's reach.

    Args:
        limits: For the program.
        reward: See `CodeTests.reward`.
        num_parallel: Maximum number of completions whose programs compute at once. Programs that
            sleep do not count: as many run as half of the free memory allows.

    Raises:
        ResourceError: When this machine gives no sandbox.
    """

    def __init__(
        self, limits: Limits, *, reward: Literal["fraction", "all"], num_parallel: int
    ) -> None:
        self._limits, self._reward = limits, reward
        # Tests may import numpy.
        self._test_limits = replace(limits, memory_mib=max(limits.memory_mib, _TEST_MEMORY_MIB))
        self._sandbox = Sandbox(
            limits, num_parallel=num_parallel, extra_mib=self._test_limits.memory_mib
        )
        self._whole: set[UnitTests] = set()

    @classmethod
    def from_config(cls, config: CodeTests) -> "CodeScorer":
        """As a recipe describes it."""
        limits = Limits(config.cpu_seconds, config.wall_seconds, config.memory_mib)
        return cls(limits, reward=config.reward, num_parallel=config.num_parallel)

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout; equal programs with equal tests run once."""
        asked = {(extract_program(r.text), r.prompt.metadata): r for r in rollouts}
        with ThreadPoolExecutor(self._sandbox.slots.most) as pool:
            found = dict(zip(asked, pool.map(self._outcome, asked.values()), strict=True))
        return [found[extract_program(r.text), r.prompt.metadata] for r in rollouts]

    def _outcome(self, rollout: Rollout) -> float | RewardError:
        return attempt(
            partial(self._score, rollout),
            prompt=rollout.prompt.text,
            completion=rollout.text,
            source="the unit tests' run",
        )

    def _score(self, rollout: Rollout) -> float:
        tests = UnitTests.of(rollout.prompt.metadata)
        program = extract_program(rollout.text)
        if tests.pieces:
            passed = self._passed_pieces(program, tests)
        else:
            passed = [self._passes(program, each) for each in tests.exchanges]
        return sum(passed) / len(passed) if self._reward == "fraction" else float(all(passed))

    def _passes(self, program: str, exchange: InputOutputTest) -> bool:
        ended = self._sandbox.run({"main.py": program}, stdin=exchange.stdin)
        return ended.succeeded and lines_of(ended.stdout) == lines_of(exchange.stdout)

    def _passed_pieces(self, program: str, tests: UnitTests) -> list[bool]:
        """Which pieces pass; one that the checker did not come to has not."""
        lines = self._checked(program, tests)
        if len(lines) < len(tests.pieces):
            # The checker died in a test: the program's doing, or the row's.
            self._raise_if_broken(tests)
        return [lines.get(place) is True for place in range(len(tests.pieces))]

    def _checked(self, program: str, tests: UnitTests) -> dict[Any, Any]:
        """What the checker reports. The program answers calls in one sandbox, the tests make them
        in another."""
        # The program's deadline comes first: then the tests find that it is gone, and go on.
        patient = replace(self._test_limits, wall_seconds=self._limits.wall_seconds + 5)
        with ExitStack() as running:
            slot = running.enter_context(self._sandbox.slots.taken())
            with ExitStack() as pipes:
                requests, replies = _pipe(pipes), _pipe(pipes)
                answering = running.enter_context(
                    self._sandbox.start(
                        {**_harness("program"), "program.py": program},
                        stdin=requests[0],
                        stdout=replies[1],
                    )
                )
                checking = running.enter_context(
                    self._sandbox.start(
                        {**_harness("checker"), "tests.json": stored_tests(tests)},
                        stdin=replies[0],
                        stdout=requests[1],
                        limits=_room_for_report(patient, tests),
                        readable=package_folders(),
                    )
                )
            slot.watch(answering.pid)
            slot.watch(checking.pid)
            checked = checking.wait()
            answering.terminate()
            answering.wait()
        return _report(checked)

    def _raise_if_broken(self, tests: UnitTests) -> None:
        if tests in self._whole:
            return
        first = 0
        while first < len(tests.pieces):
            ended = self._sandbox.run(
                {**_harness("row"), "tests.json": stored_tests(tests, first)},
                limits=_room_for_report(self._test_limits, tests),
                readable=package_folders(),
            )
            lines = _report(ended)
            if first not in lines:
                raise _broken(
                    f"test {first}: it ends its process, or reaches the limits, before it has "
                    "asked the program for anything"
                )
            # Many tests may have reached the limits together: the next one begins with new ones.
            while first in lines:
                first += 1
        self._whole.add(tests)


def _room_for_report(limits: Limits, tests: UnitTests) -> Limits:
    """A line a test, of which none may be cut off."""
    return replace(limits, output_bytes=limits.output_bytes + 32 * len(tests.pieces))


def _pipe(closing: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for each in ends:
        closing.callback(os.close, each)
    return ends


@cache
def _harness(name: str) -> dict[str, str]:
    """The files of a sandbox that runs one of the checker's modules, under the names they have
    here."""
    files = {
        f"{_FOLDER}/{file.name}": file.read_text()
        for file in sorted(Path(__file__).with_name("code_checker").glob("*.py"))
    }
    return {**files, "main.py": f"from {_FOLDER.replace('/', '.')}.{name} import main\nmain()\n"}


def _report(ended: Finished) -> dict[Any, Any]:
    """The lines that a sandbox wrote, by the first of the two things in each.

    Raises:
        RewardError: When the tests themselves are at fault.
    """
    lines = dict(json.loads(line) for line in ended.stderr.splitlines() if line.startswith("["))
    if "broken" in lines:
        raise _broken(lines["broken"])
    return lines


def _broken(why: str) -> RewardError:
    return RewardError(
        "a row's unit tests cannot be run",
        expected="Python whose setup runs, and tests that ask the program for something",
        got=why[:300],
        fix="correct the row's metadata, or leave it out",
    )
