"""The checker's side of the two pipes to the program."""

import builtins
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from io import IOBase
from itertools import islice
from threading import RLock
from types import (
    BuiltinMethodType,
    CoroutineType,
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import IO, Any, NoReturn

from nemo_rl_core.environments.rewards.code_checker.expected import Handle, is_caught_by_library
from nemo_rl_core.environments.rewards.code_checker.names import Attributes
from nemo_rl_core.environments.rewards.code_checker.plain import (
    Encoded,
    content_of,
    decode,
    encode,
)

AWAITED = "__awaited__"
"""Name of the coroutines here that represent one of the program."""
_MOST_BYTES = 2**22
"""Size limit of one reply."""
_MOST_ITEMS = 2**16
"""Items of a test's iterator that are sent to the program."""
_FUNCTIONS = (FunctionType, MethodType, partial)


class ProgramGoneError(BaseException):
    """The program has ended, lacks a declared name, or sent a reply that cannot be read.

    It is not an Exception, so that a test that expects an exception does not catch it.
    """


class BrokenTestError(BaseException):
    """The row's test does something that cannot work with any program."""


class Connection:
    """The two pipes to the program.

    Attributes:
        is_gone: Whether the program has ended, or sent a reply that cannot be read.
        has_asked: Whether a request was made since this was last set to False.
        kept: Objects of the program by their number, and declared names. An object of the program
            is always represented by the same object here, so that `is` works.
        has_failed: Whether the test asked for something that the program could forge, or for a
            declared name that the program lacks.
        uncaught: Exceptions of the program that the test has not caught itself.
        newest: Number of the last new object.
        constructed: Numbers of objects that a call of a declared name has created, and that no
            other reply contained.
        known: Numbers of objects of which the test has used an attribute that no plain data has.
        uses_objects: Whether the test uses attributes that no plain data has.
        mixed: Numbers of objects that were computed from an object of the program and data of the
            test.
    """

    def __init__(
        self, requests: IO[bytes], replies: IO[bytes], make_remote: Callable[..., Any] | None = None
    ) -> None:
        self._requests, self._replies, self._make_remote = requests, replies, make_remote
        self._lock = RLock()  # a test may have threads
        self._values: dict[str, tuple[bool, Any]] = {}
        self._callbacks: list[Callable[..., Any]] = []
        self._kinds: dict[int, type[Exception]] = {}
        self.kept: dict[int | str, Any] = {}
        self.is_gone = self.has_asked = self.has_failed = self.uses_objects = False
        self.uncaught: list[BaseException] = []
        self.newest = 0
        self.constructed: set[int] = set()
        self.known: set[int] = set()
        self.mixed: set[int] = set()

    def begin(self) -> None:
        """Forgets what the last test did."""
        self.has_asked = self.has_failed = False
        for each in (self.uncaught, self.constructed, self.known, self.mixed):
            each.clear()

    def call(
        self,
        of: Encoded,
        attributes: Attributes,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any] | None = None,
        *,
        is_discarded: bool = False,
    ) -> Any:
        """Returns the value of a call.

        Args:
            of: A name or an object of the program.
            attributes: Attributes that lead to the function.
            arguments: Arguments that `sent` can encode. Lists, dicts and sets among them get the
                changes that the program made if the call returns None or its result is not used.
            keywords: Keyword arguments; these never change.
            is_discarded: Whether the test does not use the result.
        """
        # A call may change all values of the program.
        self._values.clear()
        has_value, result = self._ask_call(of, attributes, arguments, keywords or {}, is_discarded)
        if not has_value:
            self._raise(result)
        return result

    def helped(self, name: str, *arguments: Any, is_kept: bool = True) -> Any:
        """Calls a helper of `program`, or a function such as `operator.add`, in its process.

        The result is cached until the next call, unless `is_kept` is false.
        """
        module, _, member = name.rpartition(".")
        target = ["imported", [module, member]] if module else ["helper", name]
        if not is_kept:
            return self.call(target, (), arguments)
        key = json.dumps([name, encode(arguments, self.sent)])
        if key not in self._values:
            self._values[key] = self._ask_call(target, (), arguments, {}, False)
        return self._value_of(key)

    def value(self, of: Encoded, attributes: Attributes) -> Any:
        """Returns the value of a name or an attribute.

        It is cached until the next call, so that one expression of a test cannot see two values.
        """
        key = json.dumps([of, attributes])
        if key not in self._values:
            self._values[key] = self._ask(of, attributes, {})
        return self._value_of(key)

    def catch(self, error: BaseException | None) -> None:
        """Records that the test has caught an exception; `except*` catches a group."""
        for each in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
            self.catch(each)
        self.uncaught = [each for each in self.uncaught if each is not error]

    def mark_failed(self, _why: str) -> None:
        """Fails the test without an exception."""
        self.has_failed = True

    def fail(self, why: str) -> NoReturn:
        """Fails the test, even if the test catches the exception."""
        self.has_failed = True
        raise AssertionError(why)

    def exception_class(self, reported: Encoded) -> type[BaseException]:
        """Returns the local class for an exception class that the program reports."""
        if not isinstance(reported, list):
            kind = getattr(builtins, str(reported), None)
            if kind is SystemExit:
                return SystemExit
            # These two would end a generator of the test.
            ends_iteration = kind in (StopIteration, StopAsyncIteration)
            if isinstance(kind, type) and issubclass(kind, Exception) and not ends_iteration:
                return kind
            return RuntimeError
        number, full, bases = reported
        if number not in self._kinds:
            module, _, name = str(full).rpartition(".")
            standard = getattr(sys.modules.get(module), name, None)
            if isinstance(standard, type) and issubclass(standard, Exception) and _is_public(full):
                return standard
            parents = [self.exception_class(each) for each in bases]
            kinds = tuple(each for each in parents if issubclass(each, Exception)) or (Exception,)
            self._kinds[number] = type(name, kinds, {"__str__": _text, "__getattr__": _attribute})
        return self._kinds[number]

    def sent(self, value: Any) -> Encoded:  # noqa: PLR0911 (a table)
        """Encodes an argument that is not plain data."""
        if isinstance(value, Handle):
            reference = object.__getattribute__(value, "_reference")
            value_there = reference.value() if reference.attributes else None
            if value_there is None or isinstance(value_there, Handle):
                return reference.of if value_there is None else self.sent(value_there)
            return encode(value_there, self.sent)
        if number := self._number_of(value):
            return ["kept", number]
        if isinstance(value, CoroutineType) and value.__qualname__ == AWAITED:
            if value.cr_frame is None:
                self.fail("the test sends a coroutine of the program that it has awaited")
            return self.sent(value.cr_frame.f_locals["remote"])
        if isinstance(value, BaseException):
            return ["error", [self.sent(type(value)), encode(value.args, self.sent)]]
        owner = getattr(value, "__self__", None)
        is_method = isinstance(value, BuiltinMethodType) and not isinstance(
            owner, (type, ModuleType, NoneType)
        )
        if is_method or (
            isinstance(value, _FUNCTIONS)
            and (getattr(value, "__module__", "") or "") not in (sys.stdlib_module_names)
        ):
            self._callbacks.append(value)
            return ["callback", [len(self._callbacks) - 1, getattr(value, "__name__", "function")]]
        if isinstance(value, Iterator) and not isinstance(value, IOBase):
            return ["iterator", encode(list(islice(value, _MOST_ITEMS)), self.sent)]
        owner = getattr(value, "__objclass__", None)
        module = getattr(owner or value, "__module__", None)
        name = getattr(value, "__qualname__", None)
        if isinstance(module, str) and isinstance(name, str) and _is_standard(module):
            return ["imported", [module, name]]
        content = content_of(value)
        if content is not value:
            return encode(content, self.sent)
        raise BrokenTestError(
            f"an argument of type {type(value).__name__} cannot be sent to the program"
        )

    def _number_of(self, value: Any) -> int | None:
        if isinstance(value, type):
            return next((number for number, kind in self._kinds.items() if kind is value), None)
        origin = value.__dict__.get("_origin") if isinstance(value, BaseException) else None
        return origin and origin[2]

    def _value_of(self, key: str) -> Any:
        has_value, result = self._values[key]
        if has_value:
            return result
        if not isinstance(result, AttributeError):  # `hasattr` asks for nothing else
            self._raise(result)
        raise result

    def _raise(self, error: Exception) -> NoReturn:
        if not is_caught_by_library():
            self.uncaught.append(error)
        raise error

    def _ask_call(
        self,
        of: Encoded,
        attributes: Attributes,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        is_discarded: bool,
    ) -> tuple[bool, Any]:
        call = {
            "arguments": encode(arguments, self.sent),
            "keywords": encode(keywords, self.sent),
            "is_discarded": is_discarded,
        }
        return self._ask(of, attributes, call, arguments)

    def _ask(
        self,
        of: Encoded,
        attributes: Attributes,
        call: dict[str, Encoded],
        arguments: tuple[Any, ...] = (),
    ) -> tuple[bool, Any]:
        """Returns whether the program returned, and the result or the exception."""
        with self._lock:
            return self._asked({"of": of, "attributes": attributes, **call}, arguments)

    def _asked(self, request: Encoded, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        self.has_asked = True
        if self.is_gone:
            raise ProgramGoneError
        is_discarded = request.get("is_discarded") is True
        while True:
            try:
                self._requests.write(json.dumps(request).encode() + b"\n")
                self._requests.flush()
                kind, content, *more = json.loads(self._replies.readline(_MOST_BYTES))
                printed, changed = more or ("", None)
                if printed:
                    sys.stdout.write(printed)
                if kind != "callback":
                    return self._answer(kind, content, changed, arguments, is_discarded)
                number, (values, named) = content
                values = [decode(each, self._remote) for each in values]
                keywords = decode(named, self._remote)
            # Broad on purpose: a hostile program may send anything.
            except Exception as problem:
                self.is_gone = True
                raise ProgramGoneError from problem
            request = self._called_back(number, values, keywords)

    def _answer(
        self,
        kind: str,
        content: Encoded,
        changed: Encoded,
        arguments: tuple[Any, ...],
        is_discarded: bool,
    ) -> tuple[bool, Any]:
        if kind == "returned":
            result = decode(content, self._remote)
            # Otherwise a program could empty the list that the test compares the result with.
            for index, now in changed or () if result is None or is_discarded else ():
                _change(arguments[index], decode(now, self._remote))
            return True, result
        if kind == "missing":
            self.has_failed = True
            raise ProgramGoneError
        return False, self._exception(*content)

    def _called_back(self, number: Any, values: list[Any], keywords: Any) -> Encoded:
        try:
            function = input if number == "input" else self._callbacks[number]
            result, raised = function(*values, **keywords), False
        except Exception as error:  # noqa: BLE001 (sent to the program)
            result, raised = error, True
            self.has_failed |= isinstance(error, AssertionError)
        return {"result": encode(result, self.sent), "raised": raised}

    def _remote(self, kind: str, content: Any) -> Any:
        if self._make_remote is None:
            raise ValueError(f"unknown type {kind!r}")
        return self._make_remote(self, kind, content)

    def _exception(
        self, reported: Encoded, message: Any, arguments: Encoded = None, number: Any = None
    ) -> BaseException:
        kind = self.exception_class(reported)
        values = [str(message)]
        if arguments is not None:
            values = [decode(each, self._remote) for each in arguments]
        if kind is RuntimeError and reported != "RuntimeError":
            return RuntimeError(f"{reported}: {message}")
        try:
            error = kind(*values)
        except TypeError:  # For example JSONDecodeError, whose `args` are not its arguments.
            error = kind.__new__(kind, *values)
        if kind in self._kinds.values():
            error.__dict__["_origin"] = (str(message), self, number)
        return error


def _text(error: BaseException) -> str:
    text: str = error.__dict__["_origin"][0] if "_origin" in error.__dict__ else repr(error.args)
    return text


def _attribute(error: BaseException, name: str) -> Any:
    if name.startswith("__") or "_origin" not in error.__dict__:
        raise AttributeError(name)
    _, connection, number = error.__dict__["_origin"]
    return connection.value(["kept", number], (name,))


def _change(old: Any, new: Any) -> None:
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set, deque)):
        old.clear()
        (old.extend if isinstance(old, deque) else old.update)(new)


def _is_public(full: str) -> bool:
    """Whether a class is of the standard library, and not a signal between its modules."""
    module, _, name = full.rpartition(".")
    is_signal = module.partition(".")[0] == "unittest" or name.startswith("_")
    return _is_standard(module) and not is_signal


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names
