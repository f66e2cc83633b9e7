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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nemo_rl_core.environments.rewards.code_checker.names import (
    Attributes,
    names_used,
    standard_module,
)
from nemo_rl_core.environments.rewards.code_checker.plain import Encoded, decode, encode
from nemo_rl_core.environments.rewards.code_checker.streams import silence

_MOST_BYTES = 2**20
"""Of one reply."""


class ProgramGoneError(BaseException):
    """The program has ended, or its reply cannot be read. No Exception: a test that expects one
    must not take a dead program for it."""


class BrokenTestError(BaseException):
    """The row's test does what cannot work for any program."""


class Connection:
    """The two pipes to the program.

    Attributes:
        gone: The program has ended, or its reply could not be read.
        asked: A request has been made since this was last set to False.
    """

    def __init__(self, requests: IO[bytes], replies: IO[bytes]) -> None:
        self._requests, self._replies = requests, replies
        self._values: dict[str, tuple[bool, Any]] = {}
        self.gone = self.asked = False

    def call(self, of: Encoded, attributes: Attributes, given: dict[str, Encoded]) -> Any:
        """The value that a call with the given arguments and keywords returns.

        Raises:
            ProgramGoneError: When there is no reply, or none that can be read.
            Exception: What the call raised there.
        """
        # A call may change whatever the program has.
        self._values.clear()
        return self._ask(of, attributes, given)

    def value(self, of: Encoded, attributes: Attributes) -> Any:
        """The value of a name or an attribute; it is asked for once between two calls, so that one
        expression of a test cannot be given two values.

        Raises:
            As `call`.
        """
        key = json.dumps([of, attributes])
        if key not in self._values:
            try:
                self._values[key] = (True, self._ask(of, attributes, {}))
            except Exception as error:  # noqa: BLE001 (raised each time)
                self._values[key] = (False, error)
        has_value, found = self._values[key]
        if has_value:
            return found
        raise found

    def _ask(self, of: Encoded, attributes: Attributes, given: dict[str, Encoded]) -> Any:
        self.asked = True
        if self.gone:
            raise ProgramGoneError
        request = {"of": of, "attributes": attributes, **given}
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
            kind, content = json.loads(self._replies.readline(_MOST_BYTES))
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
        return Remote(Reference(self, ["kept", content]))


@dataclass(frozen=True, slots=True)
class Reference:
    """Where something of the program's is: a name or a kept object, and attributes of it."""

    connection: Connection
    of: Encoded
    attributes: Attributes = ()

    def call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The value that calling it returns."""
        given = {"arguments": arguments, "keywords": keywords}
        sent = {name: encode(value, _as_argument) for name, value in given.items()}
        return self.connection.call(self.of, self.attributes, sent)

    def attribute(self, name: str) -> "Remote":
        """An attribute of it.

        Raises:
            AttributeError: When the program has none of that name.
        """
        found = Reference(self.connection, self.of, (*self.attributes, name))
        self.connection.value(found.of, found.attributes)
        return Remote(found)

    def plain(self) -> Any:
        """Its value, if that is plain data.

        Raises:
            AssertionError: When it is not; a kept object never is, so the program is not asked.
        """
        if self.of[0] == "named" or self.attributes:
            value = self.connection.value(self.of, self.attributes)
            if not isinstance(value, Remote):
                return value
        raise AssertionError("the program gave no plain data")


class Remote:
    """Something of the program's that is no plain data: a function, a class, an object.

    It can be called, and its methods and attributes can be used. Where it turns out to be plain
    data (a constant, an attribute), it compares as that; where not, its truth, its length and
    whether it equals something would be the program's word, so asking fails the test.
    """

    # A name that no attribute of the program's hides: those of this form are not passed on.
    __slots__ = ("__reference__",)

    def __init__(self, reference: Reference) -> None:
        self.__reference__ = reference

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: D102 (see the class)
        return self.__reference__.call(arguments, keywords)

    def __getattr__(self, name: str) -> "Remote":
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__reference__.attribute(name)

    # A constant or an attribute that is plain data compares as that data does.
    def __eq__(self, other: object) -> bool:
        return bool(self.__reference__.plain() == other)

    def __bool__(self) -> bool:
        return bool(self.__reference__.plain())

    def __len__(self) -> int:
        return len(self.__reference__.plain())

    def __iter__(self) -> Any:
        return iter(self.__reference__.plain())

    def __getitem__(self, key: Any) -> Any:
        return self.__reference__.plain()[key]

    __hash__ = None  # type: ignore[assignment]


def _as_argument(value: Any) -> Encoded:
    if not isinstance(value, Remote):
        raise BrokenTestError(
            f"an argument of type {type(value).__name__} cannot be sent to the program"
        )
    reference = value.__reference__
    return encode(reference.plain(), _as_argument) if reference.attributes else reference.of


def _exception(name: Any, message: Any) -> Exception:
    kind = getattr(builtins, str(name), None)
    # These two would end a `map` or a `for` of the test early, and what is left of it may pass.
    ends_iteration = kind in (StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not ends_iteration:
        try:
            return kind(str(message))
        except TypeError:  # Such as UnicodeDecodeError, which is made of five things.
            return RuntimeError(f"{name}: {message}")
    return RuntimeError(f"{name}: {message}")


def run_test(source: str, setup: str, connection: Connection) -> bool:
    """Whether a test passes.

    Raises:
        BrokenTestError: When every program gets the same verdict: the test cannot be compiled, its
            setup raises, or it passes or fails before it has asked the program for anything.
    """
    names: dict[str, Any] = {"__name__": "unit_test"}
    # Named fault boundaries: a setup that raises is the row's fault, for the program's names are
    # not known to it yet; a test that does has failed.
    try:
        code = compile(source, "the test", "exec")
        exec(compile(setup, "the setup", "exec"), names)
        trees = ast.parse(setup), ast.parse(source)
    except BaseException as error:
        raise BrokenTestError(f"{type(error).__name__}: {error}") from error
    for name, taken in names_used(*trees).items():
        if name not in names:
            module = standard_module(name, taken)
            names[name] = module or Remote(Reference(connection, ["named", name]))
    connection.asked = False
    why = "it passes"
    try:
        exec(code, names)
    except BrokenTestError:
        raise
    except BaseException as error:  # noqa: BLE001 (see above)
        why = f"{type(error).__name__}: {error}"
    if not connection.asked:
        raise BrokenTestError(f"{why}, before it has asked the program for anything")
    return why == "it passes" and not connection.gone


def main() -> None:
    """Reads `tests.json`; reports on stderr, a line each.

    `[place, passed]` after each test, or `["broken", why]`.
    """
    report = os.fdopen(os.dup(2), "w", encoding="utf-8")
    requests, replies = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    silence()
    stored = json.loads(Path("tests.json").read_text(encoding="utf-8"))
    connection = Connection(requests, replies)
    for place, source in enumerate(stored["tests"]):
        line: list[Any]
        try:
            line = [place, run_test(source, stored["setup"], connection)]
        except BrokenTestError as error:
            line = ["broken", f"test {place}: {error}"[:300]]
        report.write(json.dumps(line) + "\n")
        report.flush()
