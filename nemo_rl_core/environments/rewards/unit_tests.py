"""Unit tests of a row."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nemo_rl_core.environments.rewards.code_checker.names import (
    WrongNames,
    called_names,
    is_installed,
    wrong_names,
)
from nemo_rl_core.environments.rewards.code_checker.results import IS_RESULT, VALUES, is_near
from nemo_rl_core.environments.rewards.code_checker.runs import unsupported
from nemo_rl_core.errors import RewardError


@dataclass(frozen=True, slots=True)
class InputOutputTest:
    """Input of a program, and the expected output."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class UnitTests:
    """Tests of a row: either pieces of Python that call the program, or inputs and outputs.

    `setup` runs before each piece. `declared` are the program's names that the pieces use, and
    `given` is Python that the completion may continue.
    """

    setup: str
    pieces: tuple[str, ...]
    exchanges: tuple[InputOutputTest, ...]
    declared: tuple[str, ...] = ()
    given: str = ""

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, metadata: str) -> "UnitTests":
        """Reads the tests in a row's metadata, in a form that docs/code-rewards.md describes."""
        # A null in a column counts as missing.
        stored = {key: value for key, value in json.loads(metadata).items() if value is not None}
        tests = stored.get("tests")
        setup, given = stored.get("setup", ""), stored.get("given", "")
        if isinstance(tests, list) and tests and isinstance(setup, str) and isinstance(given, str):
            if all(isinstance(each, str) for each in tests):
                declared = _declared(stored) or _imported(setup, *tests)
                declared = declared or called_names(setup, tests)
                setup, *pieces = (_without_imports(each, declared) for each in (setup, *tests))
                return cls(setup, tuple(pieces), (), declared, given)
            calls = [_call(each, stored) for each in tests]
            if all(calls):
                return cls(
                    setup, tuple(each for each in calls if each), (), _declared(stored), given
                )
            exchanges = [_exchange(each) for each in tests]
            if all(exchanges):
                return cls(setup, (), tuple(each for each in exchanges if each), (), given)
        raise RewardError(
            "a row has no unit tests that can be run",
            expected='metadata with "tests": a list of pieces of Python, of objects with "stdin" '
            'and "stdout", or of objects with "arguments" and "returns"',
            got=repr(tests)[:100] if "tests" in stored else f"the keys {sorted(stored) or 'none'}",
            fix="correct the row's metadata, or remove the row",
        )

    def check_names(self) -> None:
        """Checks that each name of each piece is defined by the row or Python, or declared."""
        for index, piece in enumerate(self.pieces):
            try:
                wrong = wrong_names(self.setup, piece, self.declared)
                why = unsupported(f"{self.setup}\n{piece}", self.declared)
                wrong = wrong or (WrongNames(why, []) if why else None)
            # Null bytes, a missing module, or nesting that is too deep for the parser.
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
                else "correct the test, or remove the row",
            )


def _declared(stored: Mapping[str, Any]) -> tuple[str, ...]:
    declared = stored.get("entry_point") or []
    names = [declared] if isinstance(declared, str) else declared
    if isinstance(names, list) and all(isinstance(e, str) and e.isidentifier() for e in names):
        return tuple(names)
    raise RewardError(
        "a row has no valid list of the names that its program defines",
        expected='"entry_point": a name, or a list of names',
        got=repr(declared)[:100],
        fix='write it as "entry_point": "add"',
    )


_PROGRAM_IMPORT = re.compile(
    r"^([ \t]*)from[ \t]+(\w+)[ \t]+import[ \t]+([\w, \t]+)$", re.MULTILINE
)
_PROGRAM = "solution"
"""Module name of the program in tests of published data sets."""


def _imported(*sources: str) -> tuple[str, ...]:
    imports = [each for source in sources for each in _PROGRAM_IMPORT.findall(source)]
    names = [
        n.strip() for _, module, names in imports if module == _PROGRAM for n in names.split(",")
    ]
    return tuple(dict.fromkeys(names))


def _without_imports(source: str, declared: Sequence[str]) -> str:
    """Removes imports of the program's names from a module that does not exist."""

    def replaced(line: re.Match[str]) -> str:
        names = {each.strip() for each in line[3].split(",")}
        is_of_program = names <= {*declared} and not is_installed(line[2])
        return f"{line[1]}pass" if is_of_program else line[0]

    return _PROGRAM_IMPORT.sub(replaced, source)


def stored_tests(tests: UnitTests, first: int = 0) -> str:
    """Returns the contents of the checker's `tests.json`."""
    return json.dumps(
        {
            "setup": tests.setup,
            "tests": tests.pieces,
            "declared": tests.declared,
            "first": first,
        }
    )


def _exchange(test: Any) -> InputOutputTest | None:
    items = test.items() if isinstance(test, Mapping) else ()
    texts = {key: value for key, value in items if value is not None}
    is_text = all(isinstance(text, str) for text in texts.values())
    return InputOutputTest(**texts) if texts.keys() == {"stdin", "stdout"} and is_text else None


def _call(test: Any, stored: Mapping[str, Any]) -> str | None:
    """Converts a call with its results to Python; `returns` may be null."""
    if not isinstance(test, Mapping) or not {"arguments", "returns"} <= test.keys():
        return None
    arguments, names = test["arguments"], _declared(stored)
    if not isinstance(arguments, list) or len(names) != 1:
        return None
    accepted = [test["returns"], *(test.get("or_returns") or ())]
    # JSON text, since Python needs gigabytes to compile a list of a hundred thousand numbers.
    values, results = (f"*{VALUES}({json.dumps(each)!r})" for each in (arguments, accepted))
    return f"assert {IS_RESULT}({names[0]}({values}), {results})"


_FLOAT = re.compile(r"(?<![\w.])([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?|[-+]?\d+\.)(?![\w.])")


def is_output(printed: str, expected: str) -> bool:
    """Whether a program printed the expected output, ignoring white space at the ends of lines.

    Floats may differ by a relative 1e-7. Integers must be exact.

    Example:
        >>> is_output("0.5\\n", "0.50"), is_output("5", "5.0"), is_output("a b", "a  b")
        (True, False, False)
    """
    one, other = _lines_of(printed), _lines_of(expected)
    return one == other or (len(one) == len(other) and all(map(_is_line, one, other)))


def _is_line(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    one, other = _FLOAT.split(printed), _FLOAT.split(expected)
    return len(one) == len(other) and all(map(_is_part, one, other))


def _is_part(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    are_floats = all(
        _FLOAT.fullmatch(each) and set(each) & set(".eE") for each in (printed, expected)
    )
    return are_floats and is_near(float(printed), float(expected))


def _lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
