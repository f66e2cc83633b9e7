"""Checks which tests of a row make a request to the program, without a program.

Up to its first request a test behaves the same for every program. Each test runs in a separate
process, which ends with that request.
"""

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from nemo_rl_core.environments.rewards.code_checker.checker import import_packages, run_test
from nemo_rl_core.environments.rewards.code_checker.connection import BrokenTestError, Connection
from nemo_rl_core.environments.rewards.code_checker.streams import silence


class _FirstRequest(Connection):
    """Ends the process with the first request."""

    def __init__(self, report: int, index: int) -> None:
        null = open(os.devnull, "r+b", buffering=0)  # noqa: PTH123, SIM115 (for as long as this)
        super().__init__(null, null)
        self._report, self._index = report, index

    def _ask(self, *_: Any) -> NoReturn:
        _write(self._report, [self._index, True])
        os._exit(0)


def main() -> None:
    """Runs the tests of `tests.json`, starting at the test `first`.

    Writes one line per test to stderr: `[index, true]` for a test that makes a request,
    `["broken", why]` for one that ends before that, and nothing for one that ends its process.
    """
    report = os.dup(2)
    silence()
    import_packages()
    stored = json.loads(Path("tests.json").read_text(encoding="utf-8"))
    for index, source in list(enumerate(stored["tests"]))[stored["first"] :]:
        child = os.fork()
        if child == 0:
            try:
                first_request = _FirstRequest(report, index)
                run_test(source, stored["setup"], tuple(stored["declared"]), first_request)
            except BrokenTestError as error:
                _write(report, ["broken", f"test {index}: {error}"[:300]])
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def _write(report: int, line: list[Any]) -> None:
    os.write(report, json.dumps(line).encode() + b"\n")
