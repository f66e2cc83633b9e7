"""Objects of the program as a test sees them, and the connection on which they are asked.

A function, class or object of the program stays in its process. Its methods and attributes can be
used. Where it turns out to be plain data (a constant, an attribute), operators work on that data.
Where it is not, its truth, its length and whether it equals something would be the program's word,
so a test that asks for it fails, whatever the test makes of the exception.
"""

import builtins
import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from nemo_rl_core.environments.rewards.code_checker.expected import is_caught_by_library
from nemo_rl_core.environments.rewards.code_checker.names import Attributes
from nemo_rl_core.environments.rewards.code_checker.plain import Encoded, decode, encode

_MOST_BYTES = 2**20
"""Size limit of one reply."""
_REFERENCE = "_reference"


class ProgramGoneError(BaseException):
    """The program has ended, lacks a declared name, or sent a reply that cannot be read.

    It is not an Exception: a test that expects one must not take a dead program for it.
    """


class BrokenTestError(BaseException):
    """The row's test does something that works for no program."""


class Connection:
    """The two pipes to the program.

    Attributes:
        is_gone: Whether the program has ended, or sent a reply that cannot be read.
        has_asked: Whether a request was made since this was last set to False.
        kept: Objects of the program by their number. One object there is one object here, as `is`
            can tell.
        has_failed: Whether the test asked for something that the program could forge, or for a
            declared name that the program lacks.
        uncaught: Exceptions of the program that the test has not caught itself.
    """

    def __init__(self, requests: IO[bytes], replies: IO[bytes]) -> None:
        self._requests, self._replies = requests, replies
        self._values: dict[str, tuple[bool, Any]] = {}
        self.kept: dict[int, Remote] = {}
        self.is_gone = self.has_asked = self.has_failed = False
        self.uncaught: list[BaseException] = []

    def call(self, of: Encoded, attributes: Attributes, given: dict[str, Encoded]) -> Any:
        """Returns the value of a call with the given arguments and keywords.

        Raises:
            ProgramGoneError: If the reply is missing or cannot be read.
            Exception: As the call raised it there.
        """
        # A call may change all values of the program.
        self._values.clear()
        has_value, result = self._ask(of, attributes, given)
        if not has_value:
            self._raise(result)
        return result

    def value(self, of: Encoded, attributes: Attributes) -> Any:
        """Returns the value of a name or an attribute.

        It is asked for once between two calls, so that one expression of a test cannot see two
        values.

        Raises:
            As `call`.
        """
        key = json.dumps([of, attributes])
        if key not in self._values:
            self._values[key] = self._ask(of, attributes, {})
        has_value, result = self._values[key]
        if has_value:
            return result
        if not isinstance(result, AttributeError):  # `hasattr` asks for nothing else
            self._raise(result)
        raise result

    def catch(self, error: BaseException | None) -> None:
        """Records that the test has caught an exception; `except*` catches a group."""
        for each in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
            self.catch(each)
        self.uncaught = [each for each in self.uncaught if each is not error]

    def _raise(self, error: Exception) -> NoReturn:
        if not is_caught_by_library():
            self.uncaught.append(error)
        raise error

    def _ask(
        self, of: Encoded, attributes: Attributes, given: dict[str, Encoded]
    ) -> tuple[bool, Any]:
        """Whether the program returned, and what it returned or raised."""
        self.has_asked = True
        if self.is_gone:
            raise ProgramGoneError
        request = {"of": of, "attributes": attributes, **given}
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
            kind, content = json.loads(self._replies.readline(_MOST_BYTES))
            if kind == "returned":
                return True, decode(content, self._remote)
            result = None if kind == "missing" else _exception(*content)
        # Named fault boundary: a hostile program may send anything.
        except Exception as problem:
            self.is_gone = True
            raise ProgramGoneError from problem
        if result is None:
            self.has_failed = True
            raise ProgramGoneError
        return False, result

    def _remote(self, kind: str, content: Any) -> "Remote":
        if kind not in ("kept", "callable") or not isinstance(content, int):
            raise ValueError(f"unknown type {kind!r}")
        made = CallableRemote if kind == "callable" else Remote
        return self.kept.setdefault(content, made(Reference(self, ["kept", content])))


@dataclass(frozen=True, slots=True)
class Reference:
    """A name or a kept object of the program, and a chain of its attributes."""

    connection: Connection
    of: Encoded
    attributes: Attributes = ()

    def call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Returns the value of calling it."""
        given = {"arguments": arguments, "keywords": keywords}
        sent = {name: encode(value, _as_argument) for name, value in given.items()}
        return self.connection.call(self.of, self.attributes, sent)

    def attribute(self, name: str) -> "Remote":
        """Returns an attribute of it.

        Raises:
            AttributeError: If the program has none of that name.
        """
        result = Reference(self.connection, self.of, (*self.attributes, name))
        value = self.connection.value(result.of, result.attributes)
        return (CallableRemote if type(value) is CallableRemote else Remote)(result)

    def method(self, name: str, *arguments: Any) -> Any:
        """Returns the value of calling a method of it."""
        return Reference(self.connection, self.of, (*self.attributes, name)).call(arguments, {})

    def value(self) -> Any:
        """Returns its value: plain data, or a `Remote`."""
        if self.of[0] == "kept" and not self.attributes:
            return self.connection.kept[self.of[1]]
        return self.connection.value(self.of, self.attributes)

    def plain(self) -> Any:
        """Returns its value if that is plain data, and otherwise fails the test.

        Raises:
            AssertionError: If it is an object of the program.
        """
        value = self.value()
        if isinstance(value, Remote):
            self.connection.has_failed = True
            raise AssertionError("the program gave no plain data")
        return value


class _NoProtocols(type):
    """Keeps `isinstance(result, Iterable)` from finding the methods below in the class."""

    __mro__ = property(lambda cls: (object,))


class Remote(metaclass=_NoProtocols):
    """An object of the program that cannot be called, or an attribute that is plain data."""

    __slots__ = (_REFERENCE,)

    def __init__(self, reference: Reference) -> None:
        object.__setattr__(self, _REFERENCE, reference)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # `isinstance` asks for it
            value = reference_of(self).value()
            return type(reference_of(self).plain() if type(value) is Remote else value)
        is_asked = name in _ASKED or (name == "__dict__" and type(self) is Remote)
        if name.startswith("__") and not is_asked:
            raise AttributeError(name)
        return reference_of(self).attribute(name)

    def __setattr__(self, name: str, value: Any) -> None:
        reference_of(self).method("__setattr__", name, value)

    def __delattr__(self, name: str) -> None:
        reference_of(self).method("__delattr__", name)

    def __setitem__(self, key: Any, value: Any) -> None:
        reference_of(self).method("__setitem__", key, value)

    def __delitem__(self, key: Any) -> None:
        reference_of(self).method("__delitem__", key)

    def __str__(self) -> str:
        value = reference_of(self).value()
        return str(reference_of(self).method("__str__") if isinstance(value, Remote) else value)

    def __repr__(self) -> str:
        value = reference_of(self).value()
        return (
            str(reference_of(self).method("__repr__")) if isinstance(value, Remote) else repr(value)
        )

    def __format__(self, form: str) -> str:
        value = reference_of(self).value()
        return format(str(self) if isinstance(value, Remote) else value, form)


class CallableRemote(Remote):
    """An object of the program that can be called, or a declared name."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: D102 (see the class)
        return reference_of(self).call(arguments, keywords)


_BINARY = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor"
_OTHERS = "eq ne lt le gt ge neg pos abs invert index getitem contains"
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in f"{_BINARY} {_OTHERS}".split()},
    **{
        f"__{kind.__name__}__": kind
        for kind in (bool, len, iter, reversed, hash, int, float, complex, round, divmod)
    },
}
_ASKED = {*_OPERATORS, "__call__", "__str__", "__repr__", "__setitem__", "__delitem__"} | {
    *("__enter__", "__exit__", "__next__", "__doc__", "__name__", "__qualname__"),
}
"""Names of this form that a test may use of an object, or ask `hasattr` for."""


def _on_plain(function: Callable[..., Any], *, is_reflected: bool = False) -> Callable[..., Any]:
    def operate(*operands: Any) -> Any:
        values = [plain_or_same(each) for each in operands]
        return function(*reversed(values) if is_reflected else values)

    return operate


for _name, _function in _OPERATORS.items():
    setattr(Remote, _name, _on_plain(_function))
for _name in f"{_BINARY} divmod".split():
    setattr(Remote, f"__r{_name}__", _on_plain(_OPERATORS[f"__{_name}__"], is_reflected=True))


def reference_of(remote: Remote) -> Reference:
    """Returns where an object of the program is; its attributes are those of the program."""
    result: Reference = object.__getattribute__(remote, _REFERENCE)
    return result


def plain_or_same(value: Any) -> Any:
    """Returns the plain data of a `Remote`, and any other value as it is."""
    return reference_of(value).plain() if isinstance(value, Remote) else value


def _as_argument(value: Any) -> Encoded:
    if not isinstance(value, Remote):
        raise BrokenTestError(
            f"an argument of type {type(value).__name__} cannot be sent to the program"
        )
    reference = reference_of(value)
    return encode(reference.plain(), _as_argument) if reference.attributes else reference.of


def _exception(name: Any, message: Any) -> Exception:
    kind = getattr(builtins, str(name), None)
    # A generator of the test takes these two for its end.
    ends_iteration = kind in (StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not ends_iteration:
        try:
            return kind(str(message))
        except TypeError:  # Such as UnicodeDecodeError, which takes five arguments.
            return RuntimeError(f"{name}: {message}")
    return RuntimeError(f"{name}: {message}")
