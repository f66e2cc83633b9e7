"""Unit tests of a row, and the program in a completion that they test."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.errors import RewardError

_FENCE = "```"
_LANGUAGES = {"", "python", "py", "python3"}


def extract_program(completion: str) -> str:
    """The last fenced block that is Python or says no language; without one, the whole text.

    A block that is not closed counts: a stop string may have taken its end.

    Example:
        >>> extract_program("So:\\n```python\\nx = 1\\n```\\nDone.")
        'x = 1\\n'
    """
    blocks: list[list[str]] = []
    inside = False
    for line in completion.splitlines(keepends=True):
        mark = line.strip()
        if inside and mark == _FENCE:
            inside = False
        elif not inside and mark.startswith(_FENCE):
            inside = True
            blocks.append([mark.removeprefix(_FENCE).strip().lower()])
        elif inside:
            blocks[-1].append(line)
    programs = [lines for language, *lines in blocks if language in _LANGUAGES]
    return "".join(programs[-1]) if programs else completion


@dataclass(frozen=True, slots=True)
class InputOutputTest:
    """What a whole program must print to an input."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class UnitTests:
    """What a row demands: either pieces of Python, or exchanges."""

    setup: str
    pieces: tuple[str, ...]
    exchanges: tuple[InputOutputTest, ...]

    @classmethod
    def of(cls, metadata: str) -> "UnitTests":
        """Reads a row's metadata.

        Raises:
            RewardError: If it has no tests in the form that the module describes.
        """
        stored = json.loads(metadata)
        tests = stored.get("tests")
        setup = stored.get("setup", "")
        if isinstance(tests, list) and tests and isinstance(setup, str):
            if all(isinstance(each, str) for each in tests):
                return cls(setup, tuple(tests), ())
            if all(_is_exchange(each) for each in tests):
                return cls(setup, (), tuple(InputOutputTest(**each) for each in tests))
        raise RewardError(
            "a row has no unit tests that can be run",
            expected='metadata with "tests": a list of pieces of Python, or of objects with '
            '"stdin" and "stdout"',
            got=repr(tests)[:100] if "tests" in stored else f"the keys {sorted(stored) or 'none'}",
            fix="correct the row's metadata, or leave it out",
        )


def stored_tests(tests: UnitTests, first: int = 0) -> str:
    """The tests in a row."""
    return json.dumps({"setup": tests.setup, "tests": tests.pieces, "first": first})


def _is_exchange(test: Any) -> bool:
    return (
        isinstance(test, Mapping)
        and test.keys() == {"stdin", "stdout"}
        and all(isinstance(text, str) for text in test.values())
    )


def lines_of(text: str) -> list[str]:
    """Lines without trailing spaces."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
