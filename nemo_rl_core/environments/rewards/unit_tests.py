"""Unit tests of a row, and the program in a completion that they test."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.environments.rewards.code_checker.names import WrongNames, wrong_names
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
    """The tests of a row: either pieces of Python, or exchanges.

    Attributes:
        setup: Python that runs before each piece.
        pieces: Tests that call the program.
        exchanges: Tests that give the program an input.
        declared: Names that the pieces take from the program.
    """

    setup: str
    pieces: tuple[str, ...]
    exchanges: tuple[InputOutputTest, ...]
    declared: tuple[str, ...] = ()

    @classmethod
    def of(cls, metadata: str) -> "UnitTests":
        """Reads a row's metadata.

        Raises:
            RewardError: If it has no tests in the form that `code` describes.
        """
        stored = json.loads(metadata)
        tests = stored.get("tests")
        setup = stored.get("setup", "")
        if isinstance(tests, list) and tests and isinstance(setup, str):
            if all(isinstance(each, str) for each in tests):
                return cls(setup, tuple(tests), (), _declared(stored))
            if all(_is_exchange(each) for each in tests):
                return cls(setup, (), tuple(InputOutputTest(**each) for each in tests))
        raise RewardError(
            "a row has no unit tests that can be run",
            expected='metadata with "tests": a list of pieces of Python, or of objects with '
            '"stdin" and "stdout"',
            got=repr(tests)[:100] if "tests" in stored else f"the keys {sorted(stored) or 'none'}",
            fix="correct the row's metadata, or leave it out",
        )

    def check_names(self) -> None:
        """Checks that each name of each piece is the row's, Python's, or declared.

        Raises:
            RewardError: For the first piece with another name; its fix is the line to write.
        """
        for index, piece in enumerate(self.pieces):
            try:
                wrong = wrong_names(self.setup, piece, self.declared)
            # Null bytes, a module that is not there, and nesting that is too deep for the parser.
            except (SyntaxError, ValueError, ImportError, RecursionError, MemoryError) as error:
                wrong = WrongNames(f"{type(error).__name__}: {error}", [])
            if wrong is None:
                continue
            names = [*self.declared, *wrong.loose]
            line = json.dumps(names if len(names) > 1 else names[0]) if names else ""
            raise RewardError(
                "a row's unit tests cannot be run",
                expected='tests that use the names of the program that "entry_point" lists, and '
                'names that "setup", the test itself or Python defines',
                got=f"test {index}: {wrong.why}"[:300],
                fix=f'add "entry_point": {line} to the row, without the names that the program '
                'does not define; define or import those in "setup"'
                if wrong.loose
                else "correct the test, or leave the row out",
            )


def _declared(stored: Mapping[str, Any]) -> tuple[str, ...]:
    declared = stored.get("entry_point") or []
    names = [declared] if isinstance(declared, str) else declared
    if isinstance(names, list) and all(isinstance(e, str) and e.isidentifier() for e in names):
        return tuple(names)
    raise RewardError(
        "a row does not say which names its program defines",
        expected='"entry_point": a name, or a list of names',
        got=repr(declared)[:100],
        fix='write it as "entry_point": "add"',
    )


def stored_tests(tests: UnitTests, first: int = 0) -> str:
    """Returns the file that the checker reads."""
    return json.dumps(
        {
            "setup": tests.setup,
            "tests": tests.pieces,
            "declared": tests.declared,
            "first": first,
        }
    )


def _is_exchange(test: Any) -> bool:
    return (
        isinstance(test, Mapping)
        and test.keys() == {"stdin", "stdout"}
        and all(isinstance(text, str) for text in test.values())
    )


def lines_of(text: str) -> list[str]:
    """Lines without trailing spaces."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
