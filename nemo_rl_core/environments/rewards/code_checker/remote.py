"""Proxies of the program's objects in a test.

A function, class or object of the program stays in its process. Its methods and attributes can be
used. If it contains plain data (a constant, an attribute, an instance of a subclass of `list`),
operators work on that data. Other objects can be iterated, indexed, measured and compared with
each other. Their answers must be consistent: the length is the number of items, and indexing gives
the same items as iteration.

The program could forge whether such an object equals data of the test, is true, or contains it. A
test that asks for these fails, unless it has used an attribute of the object that no plain data
has: such a test is about the program's class.
"""

import ast
import json
import sys
from collections import Counter, deque
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

from nemo_rl_core.environments.rewards.code_checker.connection import AWAITED, Connection
from nemo_rl_core.environments.rewards.code_checker.expected import Handle
from nemo_rl_core.environments.rewards.code_checker.names import Attributes
from nemo_rl_core.environments.rewards.code_checker.plain import Encoded

_KINDS = (list, dict, str, bytes, int, float, complex, set, tuple, deque, Counter, range)
_PLAIN_ATTRIBUTES = {name for kind in _KINDS for name in dir(kind)} | {
    *("tolist", "item", "shape", "dtype", "ndim", "size")
}
"""Attributes of plain data, including numpy arrays."""
_MUTABLE = (list, dict, set, deque)
_MODULES = {*sys.stdlib_module_names, "np", "numpy", "pytest", "self"}

_SPECIAL_ATTRIBUTES = {
    f"__{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
        *("lshift", "rshift", "and", "or", "xor", "neg", "pos", "abs", "invert", "index"),
        *("eq", "ne", "lt", "le", "gt", "ge", "bool", "hash", "int", "float", "complex", "round"),
        *("len", "iter", "next", "reversed", "contains", "getitem", "setitem", "delitem"),
        *("call", "enter", "exit", "str", "repr", "doc", "name", "qualname"),
        *("bases", "mro", "module", "annotations", "wrapped"),
    )
}
"""Special attributes of an object that a test may use, or ask `hasattr` for."""


def make_remote(connection: Connection, kind: str, content: Any) -> Any:
    """Returns the representation of an object of the program.

    `kind` is `kept`, `callable`, `like` (a subclass of plain data), `iterator`, `coroutine` or
    `named`; `content` is the object's number, for `named` its name and number.
    """
    if kind == "named":
        name, content = content
        if name in connection.kept:
            return connection.kept[name]
        kind = "callable"  # a function or class that the row does not declare
    is_generator = False
    if kind == "iterator":
        content, is_generator = content
    if kind not in ("kept", "callable", "like", "iterator", "coroutine") or not isinstance(
        content, int
    ):
        raise ValueError(f"unknown type {kind!r}")
    connection.constructed.discard(content)
    if content not in connection.kept:
        connection.newest = content
        remote_reference = Reference(
            connection, ["kept", content], kind="generator" if is_generator else kind
        )
        chosen = CallableRemote if kind == "callable" else Remote
        connection.kept[content] = (
            _awaited(Remote(remote_reference)) if kind == "coroutine" else chosen(remote_reference)
        )
    return connection.kept[content]


async def _awaited(remote: "Remote") -> Any:
    return reference_of(remote).connection.helped("run", remote, is_kept=False)


_awaited.__qualname__ = AWAITED


@dataclass(frozen=True, slots=True)
class Reference:
    """A name or a kept object of the program, and a chain of its attributes."""

    connection: Connection
    of: Encoded
    attributes: Attributes = ()
    kind: str = ""

    def call(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], *, is_discarded: bool = False
    ) -> Any:
        """Calls the object, and returns the result."""
        self.connection.newest = 0
        result = self.connection.call(
            self.of, self.attributes, arguments, keywords, is_discarded=is_discarded
        )
        newest = self.connection.newest
        is_call = self.of[0] == "named" and not self.attributes
        if (
            is_call
            and newest
            and isinstance(result, Remote)
            and reference_of(result).of[1] == newest
        ):
            self.connection.constructed.add(newest)
        return result

    def attribute(self, name: str) -> Any:
        """Returns an attribute of the object; a mutable one as a `Remote`."""
        result = Reference(self.connection, self.of, (*self.attributes, name))
        value = self.connection.value(result.of, result.attributes)
        is_special = name in _PLAIN_ATTRIBUTES or name.startswith("__")
        if self.of[0] == "kept" and not self.attributes and not is_special:
            self.connection.known.add(self.of[1])
        is_object = type(value) is Remote and reference_of(value).kind != "like"
        if is_object or not isinstance(value, (Remote, *_MUTABLE)):
            return value
        return (CallableRemote if type(value) is CallableRemote else Remote)(result)

    def method(self, name: str, *arguments: Any) -> Any:
        """Calls a method of the object, and returns the result."""
        return Reference(self.connection, self.of, (*self.attributes, name)).call(arguments, {})

    def value(self) -> Any:
        """Returns the value of the object: plain data, or a `Remote`."""
        if self.of[0] == "kept" and not self.attributes:
            if self.kind == "like":
                return self.connection.helped("content", Remote(self))
            return self.connection.kept[self.of[1]]
        value = self.connection.value(self.of, self.attributes)
        if isinstance(value, Remote) and reference_of(value).kind == "like":
            return reference_of(value).value()
        return value

    def number(self) -> int:
        """Returns the number of the object that the reference resolves to."""
        value = self.value()
        number: int = reference_of(value).of[1]
        return number

    def helped(self, name: str, *others: Any, is_kept: bool = True) -> Any:
        """Calls a function in the program's process with the object as first argument."""
        return self.connection.helped(name, self.value(), *others, is_kept=is_kept)

    def items(self) -> tuple[list[Any], Any, bool] | None:
        """Returns the first items, an iterator of the rest or None, and whether they are keys.

        Returns None for an iterator, which yields its items only once, and for an object that
        cannot be iterated.
        """
        batch = self.helped("batch")
        if not isinstance(batch, list):
            return None
        items, others, size, has_keys = batch
        if size is not None and (size < len(items) or (others is None and size != len(items))):
            self.connection.fail(
                "the length of an object of the program is not its number of items"
            )
        return items, others, has_keys


class _NoProtocols(type):
    """Keeps `isinstance(result, Iterable)` from finding the methods below in the class."""

    __mro__ = property(lambda cls: (object,))


class Remote(Handle, metaclass=_NoProtocols):
    """An object of the program that cannot be called, or an attribute that is plain data."""

    __slots__ = ()

    def __init__(self, reference: Reference) -> None:
        object.__setattr__(self, "_reference", reference)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # `isinstance` asks for it
            value = reference_of(self).value()
            if not isinstance(value, Remote):
                return type(value)
            return GeneratorType if reference_of(value).kind == "generator" else type(value)
        is_asked = name in _SPECIAL_ATTRIBUTES or (name == "__dict__" and type(self) is Remote)
        if name.startswith("__") and not is_asked:
            raise AttributeError(name)
        return reference_of(self).attribute(name)

    def __setattr__(self, name: str, value: Any) -> None:
        reference_of(self).helped("builtins.setattr", name, value, is_kept=False)

    def __delattr__(self, name: str) -> None:
        reference_of(self).helped("builtins.delattr", name, is_kept=False)

    def __setitem__(self, key: Any, value: Any) -> None:
        reference_of(self).method("__setitem__", key, value)

    def __delitem__(self, key: Any) -> None:
        reference_of(self).method("__delitem__", key)

    def __enter__(self) -> Any:
        return reference_of(self).method("__enter__")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return reference_of(self).method("__exit__", kind, error, None)

    async def __aenter__(self) -> Any:
        return await reference_of(self).method("__aenter__")

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        reference = reference_of(self)
        is_suppressed = await reference.method("__aexit__", kind, error, None)
        if is_suppressed and error is not None:
            reference.connection.fail("the program suppresses an exception of the test")

    async def __aiter__(self) -> Any:
        items, error = reference_of(self).helped("async_items", is_kept=False)
        for each in items:
            yield each
        if error is not None:
            reference_of(self).connection.helped("raise", error)

    def __str__(self) -> str:
        return _as_text(self, "str")

    def __repr__(self) -> str:
        return _as_text(self, "repr")

    def __format__(self, form: str) -> str:
        reference = reference_of(self)
        value = reference.value()
        if not isinstance(value, Remote):
            return format(value, form)
        return str(reference.helped("builtins.format", form))

    def __next__(self) -> Any:
        reference = reference_of(self)
        items = reference.helped("next", is_kept=False)
        if not items:
            raise StopIteration
        return items[0]


class CallableRemote(Remote):
    """An object of the program that can be called, or a declared name."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: D102 (see the class)
        return reference_of(self).call(arguments, keywords)

    def __instancecheck__(self, instance: Any) -> bool:
        if isinstance(instance, BaseException):
            return isinstance(instance, class_of(self))
        if not isinstance(instance, Remote):
            return False
        connection = reference_of(self).connection
        return connection.helped("builtins.isinstance", instance, self) is True


def class_of(kind: Any) -> Any:
    """Returns the local class for an exception class of the program; other values unchanged."""
    if isinstance(kind, tuple):
        return tuple(map(class_of, kind))
    if not isinstance(kind, Remote):
        return kind
    connection = reference_of(kind).connection
    reported = connection.helped("class", kind)
    if reported is None:
        connection.fail("the program has no exception of that name")
    return connection.exception_class(json.loads(reported))


def reference_of(remote: Remote) -> Reference:
    """Returns the reference of a proxy, whose own attributes are those of the program's object."""
    result: Reference = object.__getattribute__(remote, "_reference")
    return result


def is_subclass(kind: Any, kinds: Any) -> bool:
    """Replaces `issubclass`; also works with classes of the program."""
    for each in (kind, *(kinds if isinstance(kinds, tuple) else (kinds,))):
        if isinstance(each, Remote):
            ask = reference_of(each).connection.helped
            return ask("builtins.issubclass", kind, kinds) is True
    return issubclass(kind, kinds)


def _as_text(remote: Remote, kind: str) -> str:
    reference = reference_of(remote)
    value = reference.value()
    if isinstance(value, Remote) or reference.kind == "like":
        return str(reference.connection.helped(f"builtins.{kind}", remote))
    return str(value) if kind == "str" else repr(value)


def kind_of(value: Any) -> Any:
    """Replaces `type`; also works with objects of the program."""
    if not isinstance(value, Remote):
        return type(value)
    reference = reference_of(value)
    inner = reference.value()
    if not isinstance(inner, Remote) and reference.kind != "like":
        return type(inner)
    return reference.connection.helped("builtins.type", value)


def unused(called: Any) -> Any:
    """Returns the function to call if the test does not use the result."""
    if type(called) is not CallableRemote:
        return called
    reference = reference_of(called)
    return lambda *arguments, **keywords: reference.call(arguments, keywords, is_discarded=True)


def uses_objects(source: str) -> bool:
    """Whether a test uses attributes of results that no plain data has.

    Example:
        >>> uses_objects("assert tree.find(3).value == 3")
        True
        >>> uses_objects("assert math.sqrt(f()) == 2 and f().count(1) == 1")
        False
    """
    nodes = ast.walk(ast.parse(source))
    taken = [node for node in nodes if isinstance(node, ast.Attribute)]
    return any(
        node.attr not in _PLAIN_ATTRIBUTES
        and not node.attr.startswith("assert")
        and getattr(node.value, "id", "") not in _MODULES
        for node in taken
    )
