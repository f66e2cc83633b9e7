"""Scores completions that are programs with the unit tests of their row.

docs/code-rewards.md has the forms of a row's tests, and what a test can do with the program.

A row is broken, and has no score, if one of its pieces gets the same verdict for every program: the
piece or its setup cannot be compiled, a name is not defined, the setup raises, an argument cannot
be sent, or the piece ends (it passes, raises, exits, or reaches the limits) before its first
request to the program. A piece that fails for every program after its first request is not
detected.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from nemo_rl_core.config.single_turn import CodeTests
from nemo_rl_core.environments.interfaces import Scorer, attempt, error_context
from nemo_rl_core.environments.rewards.code_checker.names import package_folders
from nemo_rl_core.environments.rewards.code_checker.preamble import preamble
from nemo_rl_core.environments.rewards.programs import extract_program
from nemo_rl_core.environments.rewards.unit_tests import (
    InputOutputTest,
    UnitTests,
    is_output,
    stored_tests,
)
from nemo_rl_core.environments.sandbox import Finished, Limits, Sandbox
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

_TEST_MEMORY_MIB = 512
_FOLDER = "nemo_rl_core/environments/rewards/code_checker"


class CodeScorer(Scorer):
    """The fraction of a row's unit tests that a completion's program passes, or all or nothing.

    A program that is wrong, crashes, or exceeds its limits earns 0 for the tests that it does not
    pass. A row whose tests cannot be run, and a sandbox that does not start, are errors. The
    program and the tests run in two sandboxes, so that the program can access neither the verdict
    nor the expected values.
    """

    def __init__(self, config: CodeTests) -> None:
        self._reward, self._output_kib = config.reward, config.output_kib
        limits = Limits(config.cpu_seconds, config.wall_seconds, config.memory_mib)
        # Tests may import numpy, and have threads.
        test_mib = max(limits.memory_mib, _TEST_MEMORY_MIB)
        self._limits = limits
        self._test_limits = replace(limits, memory_mib=test_mib, num_processes=32)
        self._sandbox = Sandbox(limits, num_parallel=config.num_parallel, extra_mib=test_mib)
        self._valid_tests: set[UnitTests] = set()

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one outcome per rollout; equal programs with equal tests run once."""
        keys = [(_program(r), r.prompt.metadata) for r in rollouts]
        unique = dict(zip(keys, rollouts, strict=True))
        with ThreadPoolExecutor(self._sandbox.slots.most) as pool:
            outcomes = pool.map(self._outcome, unique.values(), (program for program, _ in unique))
            scores = dict(zip(unique, outcomes, strict=True))
        return [scores[key] for key in keys]

    def _outcome(self, rollout: Rollout, program: str) -> float | RewardError:
        score = partial(self._score, rollout.prompt.metadata, program)
        return attempt(score, **error_context(rollout, "the unit tests' run"))

    def _score(self, metadata: str, program: str) -> float:
        tests = UnitTests.of(metadata)
        if tests.pieces:
            passed = self._passed_pieces(program, tests)
        else:
            passed = [self._passes(program, each) for each in tests.exchanges]
        return sum(passed) / len(passed) if self._reward == "fraction" else float(all(passed))

    def _passes(self, program: str, exchange: InputOutputTest) -> bool:
        if not program.strip():
            return False
        # Twice the expected output, so that an output that is too long is compared, not truncated.
        default_bytes = max(2**16, 2 * len(exchange.stdout.encode()))
        max_bytes = self._output_kib * 2**10 if self._output_kib else default_bytes
        ended = self._sandbox.run(
            _script(program),
            stdin=exchange.stdin,
            limits=replace(self._limits, output_bytes=max_bytes),
        )
        return ended.succeeded and is_output(ended.stdout, exchange.stdout)

    def _passed_pieces(self, program: str, tests: UnitTests) -> list[bool]:
        lines = self._checked(program, tests)
        if len(lines) < len(tests.pieces):
            # The checker died in a test, because of the program or because of the row.
            self._raise_if_broken(tests)
        return [lines.get(index) is True for index in range(len(tests.pieces))]

    def _checked(self, program: str, tests: UnitTests) -> dict[Any, Any]:
        """Runs the tests in one sandbox and the program in another; returns the report."""
        # The program's deadline comes first: then the tests notice that it is gone, and continue.
        longer_limits = replace(self._test_limits, wall_seconds=self._limits.wall_seconds + 5)
        with ExitStack() as running:
            slot = running.enter_context(self._sandbox.slots.taken())
            with ExitStack() as pipes:
                requests, replies = _pipe(pipes), _pipe(pipes)
                answering = running.enter_context(
                    self._sandbox.start(
                        {
                            **_harness("program"),
                            "program.py": program,
                            "preamble.py": preamble(program),
                        },
                        stdin=requests[0],
                        stdout=replies[1],
                    )
                )
                checking = running.enter_context(
                    self._sandbox.start(
                        {**_harness("checker"), "tests.json": stored_tests(tests)},
                        stdin=replies[0],
                        stdout=requests[1],
                        limits=_room_for_report(longer_limits, tests),
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
        if tests in self._valid_tests:
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
                    f"test {first}: it ends its process, or reaches the limits, before its first "
                    "request to the program"
                )
            # Several tests may have reached the limits together: the rest start with full limits.
            while first in lines:
                first += 1
        self._valid_tests.add(tests)


def _room_for_report(limits: Limits, tests: UnitTests) -> Limits:
    return replace(limits, output_bytes=limits.output_bytes + 32 * len(tests.pieces))


def _program(rollout: Rollout) -> str:
    try:
        tests = UnitTests.of(rollout.prompt.metadata)
    except RewardError:  # reported when the row is scored
        return ""
    return extract_program(rollout.text, tests.declared, tests.given)


def _script(program: str) -> dict[str, str]:
    before = preamble(program)
    if not before:
        return {"main.py": program}
    run = "exec(compile(open('program.py', encoding='utf-8').read(), 'program.py', 'exec'))\n"
    return {"main.py": before + run, "program.py": program}


def _pipe(closing: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for each in ends:
        closing.callback(os.close, each)
    return ends


@cache
def _harness(name: str) -> dict[str, str]:
    files = {
        f"{_FOLDER}/{file.name}": file.read_text()
        for file in sorted(Path(__file__).with_name("code_checker").glob("*.py"))
    }
    return {**files, "main.py": f"from {_FOLDER.replace('/', '.')}.{name} import main\nmain()\n"}


def _report(ended: Finished) -> dict[Any, Any]:
    lines = dict(json.loads(line) for line in ended.stderr.splitlines() if line.startswith("["))
    if "broken" in lines:
        raise _broken(lines["broken"])
    return lines


def _broken(why: str) -> RewardError:
    return RewardError(
        "a row's unit tests cannot be run",
        expected="a setup that runs, and tests that call the program",
        got=why[:300],
        fix="correct the row's metadata, or remove the row",
    )
