"""Runs a row's unit tests against a program that lives in another process.

A name that a test does not define is the program's: it is bound to a `Remote`, and calling that
asks the other process. What comes back is plain data, so comparing it is this process's affair
alone: an object that claims to be equal to everything, a patched `assert`, an early exit or a
printed "passed" have no way in.
"""

import ast
import builtins
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from nemo_rl_core.environments.code_checker.plain import Encoded, decode, encode

_MOST_BYTES = 2**20
"""Of one reply."""


class ProgramGoneError(BaseException):
    """The program has ended, or talks nonsense. No Exception: a test that expects one must not
    take a dead program for it."""


class BrokenTestError(BaseException):
    """The row's test does what cannot work for any program."""


class Connection:
    """The two pipes to the program.

    Attributes:
        gone: The program has ended, or talked nonsense.
    """

    def __init__(
        self, requests: IO[bytes], replies: IO[bytes], on_answer: Callable[[], None]
    ) -> None:
        self._requests, self._replies, self._on_answer = requests, replies, on_answer
        self.gone = False

    def ask(self, request: dict[str, Any]) -> Any:
        """What the program says to a request.

        Raises:
            ProgramGoneError: When it says nothing, or nothing that can be read.
            Exception: What the call raised there.
        """
        if self.gone:
            raise ProgramGoneError
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
            line = self._replies.readline(_MOST_BYTES)
            self._on_answer()
            kind, content = json.loads(line)
            if kind == "returned":
                return decode(content, self._remote)
            name, message = content
            error = _exception(name, message)
        # Named fault boundary: anything at all may come from a hostile program.
        except Exception as problem:
            self.gone = True
            raise ProgramGoneError from problem
        raise error

    def _remote(self, kind: str, content: Any) -> "Remote":
        if kind != "kept" or not isinstance(content, int):
            raise ValueError(f"unknown type {kind!r}")
        return Remote(self, ["kept", content])


class Remote:
    """Something of the program's that is no plain data: a function, a class, an object.

    It can be called, and its methods and attributes can be used. Where it turns out to be plain
    data (a constant, an attribute), it compares as that; where not, its truth, its length and
    whether it equals something would be the program's word, so asking fails the test.
    """

    def __init__(self, connection: Connection, of: Encoded, attributes: tuple[str, ...] = ()):
        self._connection, self._of, self._attributes = connection, of, attributes

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: D102 (see the class)
        return self._connection.ask(
            {
                "of": self._of,
                "attributes": self._attributes,
                "arguments": encode(arguments, _as_argument),
                "keywords": encode(keywords, _as_argument),
            }
        )

    def __getattr__(self, name: str) -> "Remote":
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(self._connection, self._of, (*self._attributes, name))

    def _value(self) -> Any:
        value = self._connection.ask({"of": self._of, "attributes": self._attributes})
        return _refuse() if isinstance(value, Remote) else value

    # A constant or an attribute that is plain data compares as that data does.
    def __eq__(self, other: object) -> bool:
        return bool(self._value() == other)

    def __bool__(self) -> bool:
        return bool(self._value())

    def __len__(self) -> int:
        return len(self._value())

    def __iter__(self) -> Any:
        return iter(self._value())

    def __getitem__(self, key: Any) -> Any:
        return self._value()[key]

    __hash__ = None  # type: ignore[assignment]


def _refuse() -> NoReturn:
    raise AssertionError("the program gave no plain data")


def _as_argument(value: Any) -> Encoded:
    if isinstance(value, Remote) and not value._attributes:
        return value._of
    if isinstance(value, Remote):
        return encode(value._value(), _as_argument)
    raise BrokenTestError(
        f"an argument of type {type(value).__name__} cannot be sent to the program"
    )


def _exception(name: Any, message: Any) -> Exception:
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(str(message))
        except TypeError:  # Such as UnicodeDecodeError, which is made of five things.
            return RuntimeError(f"{name}: {message}")
    return RuntimeError(f"{name}: {message}")


def run_test(source: str, setup: str, connection: Connection) -> bool:
    """Whether a test passes.

    Raises:
        BrokenTestError: When it cannot be compiled, or its setup raises.
    """
    names: dict[str, Any] = {"__name__": "unit_test"}
    # Named fault boundaries: a setup that raises is the row's fault, for the program's names are
    # not known to it yet; a test that does has failed.
    try:
        code = compile(source, "the test", "exec")
        exec(compile(setup, "the setup", "exec"), names)
        for name in _names_used(f"{setup}\n{source}") - names.keys():
            names[name] = Remote(connection, ["named", name])
    except Exception as error:
        raise BrokenTestError(f"{type(error).__name__}: {error}") from error
    try:
        exec(code, names)
    except (Exception, SystemExit, ProgramGoneError):  # noqa: BLE001 (see above)
        return False
    return not connection.gone


def _names_used(source: str) -> set[str]:
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return used - set(dir(builtins))


def main() -> None:
    """Reads `tests.json`; reports on stderr, a line each.

    `["answered", true]` when the program has first answered a test, `[place, passed]` after each
    test, or `["broken", why]`.
    """
    report = os.fdopen(os.dup(2), "w", encoding="utf-8")
    requests, replies = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115

    def say(line: list[Any]) -> None:
        report.write(json.dumps(line) + "\n")
        report.flush()

    stored = json.loads(Path("tests.json").read_text(encoding="utf-8"))
    connection = Connection(requests, replies, cache(lambda: say(["answered", True])))
    for place, source in enumerate(stored["tests"]):
        try:
            say([place, run_test(source, stored["setup"], connection)])
        except BrokenTestError as error:
            say(["broken", f"test {place}: {error}"])
