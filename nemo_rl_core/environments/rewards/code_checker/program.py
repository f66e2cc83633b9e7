"""Runs a completion's program, and calls its functions on request of the checker.

The program may corrupt this process, but only three things leave it: the results of calls, printed
text, and changed arguments.
"""

import builtins
import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import CoroutineType
from typing import IO, Any

from nemo_rl_core.environments.rewards.code_checker.plain import (
    Encoded,
    content_of,
    decode,
    encode,
)
from nemo_rl_core.environments.rewards.code_checker.streams import silence

_NUM_AT_ONCE = 1000
"""Number of items of an iterable that are sent together."""
_MOST_PRINTED = 2**18
_MUTABLE = (list, dict, set, bytearray)
_DRAWN = {"builtins", "itertools"}
"""Modules of Python's built-in iterators."""


class _MissingNameError(Exception):
    """The program does not define a name that the row declares."""


def main() -> None:
    """Answers calls, one per line, until stdin closes."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    silence()
    printed = _Printed()
    # Not __main__: the tests do not cover what the program does as a script.
    names: dict[str, Any] = {"__name__": "program"}
    program = _Program(names, requests, replies, printed)
    builtins.input = program.input
    sys.stdout = printed.file()
    exec(Path("preamble.py").read_text(encoding="utf-8"), {})
    with suppress(SystemExit):
        exec(compile(Path("program.py").read_text(encoding="utf-8"), "program.py", "exec"), names)
    for line in requests:
        program.answer(json.loads(line))


class _Printed:
    def __init__(self) -> None:
        self._bytes = io.BytesIO()

    def file(self) -> IO[str]:
        return io.TextIOWrapper(self._bytes, encoding="utf-8", write_through=True)

    def taken(self) -> str:
        if not self._bytes.tell():
            return ""
        text = self._bytes.getvalue()[:_MOST_PRINTED].decode(errors="replace")
        self._bytes.seek(0)
        self._bytes.truncate()
        return text


class _Program:
    def __init__(
        self, names: dict[str, Any], requests: IO[bytes], replies: IO[bytes], printed: _Printed
    ) -> None:
        self._names, self._requests, self._replies = names, requests, replies
        self._kept: dict[int, Any] = {}
        self._printed = printed

    def answer(self, request: dict[str, Any]) -> None:
        reply, changed = self._reply(request)
        printed = self._printed.taken()
        self._write([*reply, printed, changed] if printed or changed else reply)

    def input(self, prompt: object = "") -> Any:
        """Replaces Python's `input`; calls the checker's, which tests may have patched."""
        return self._ask_back(["input", [[str(prompt)], ["dict", []]]])

    def _write(self, reply: Encoded) -> None:
        self._replies.write(json.dumps(reply).encode() + b"\n")
        self._replies.flush()

    def _ask_back(self, call: Encoded) -> Any:
        """Calls a function of the test, which may call the program before it returns."""
        self._write(["callback", call, self._printed.taken(), None])
        for line in self._requests:
            request = json.loads(line)
            if "result" in request:
                value = decode(request["result"], self._object)
                if isinstance(value, BaseException) and request["raised"]:
                    raise value
                return value
            self.answer(request)
        raise SystemExit

    def _reply(self, request: dict[str, Any]) -> tuple[list[Encoded], Encoded]:
        changed: Encoded = None
        # Broad on purpose: an exception of a call is its result, which the test checks.
        try:
            value = decode(request["of"], self._object)
            for attribute in request["attributes"]:
                value = getattr(value, attribute)
            if "arguments" in request:
                arguments = decode(request["arguments"], self._object)
                value = value(*arguments, **decode(request["keywords"], self._object))
                if value is None or request.get("is_discarded"):
                    changed = self._changed(request["arguments"], arguments)
            return ["returned", encode(value, self._keep)], changed
        except _MissingNameError as error:
            return ["missing", str(error)], None
        except (Exception, SystemExit) as error:  # noqa: BLE001 (sent to the checker)
            return ["raised", self._raised(error)], None

    def _changed(self, before: Encoded, arguments: Any) -> Encoded:
        return [
            [index, now]
            for index, value in enumerate(arguments)
            if isinstance(value, _MUTABLE) or type(value).__name__ in ("deque", "Counter")
            if (now := encode(value, self._keep)) != before[1][index]
        ] or None

    def _raised(self, error: BaseException) -> Encoded:
        values = [str(error)[:200]]
        with suppress(Exception):
            encoded = [encode(each, self._keep) for each in error.args]
            if len(json.dumps(encoded)) < 10_000:
                values = encoded
        self._kept[id(error)] = error
        return [_class_of(type(error), self._kept), str(error)[:10_000], values, id(error)]

    def _keep(self, value: Any) -> Encoded:
        kind = type(value)
        name = getattr(value, "__name__", None) if callable(value) else None
        if isinstance(name, str) and self._names.get(name) is value:
            self._kept[id(value)] = value
            return ["named", [name, id(value)]]
        self._kept[id(value)] = value
        if isinstance(value, CoroutineType):
            return ["coroutine", id(value)]
        if kind.__module__ in _DRAWN and hasattr(kind, "__next__"):
            return ["iterator", [id(value), kind.__name__ == "generator"]]
        if content_of(value) is not value:
            return ["like", id(value)]
        return ["callable" if callable(value) else "kept", id(value)]

    def _object(self, kind: str, content: Any) -> Any:  # noqa: PLR0911 (a table)
        match kind:
            case "kept":
                return self._kept[content]
            case "helper":
                return _HELPERS[content]
            case "imported":
                module, name = content
                value = import_module(module)
                for part in name.split("."):
                    value = getattr(value, part)
                return value
            case "iterator":
                return iter(decode(content, self._object))
            case "error":
                error_class, arguments = content
                return decode(error_class, self._object)(*decode(arguments, self._object))
            case "callback":
                return self._callback(*content)
        if content in self._names:
            return self._names[content]
        # The function may be a method of `Solution`, as in LeetCode problems.
        solution = self._names.get("Solution")
        if isinstance(solution, type) and hasattr(solution, content):
            return getattr(solution(), content)
        raise _MissingNameError(content)

    def _callback(self, number: int, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            encoded = [encode(each, self._keep) for each in arguments]
            return self._ask_back([number, [encoded, encode(keywords, self._keep)]])

        call.__name__ = name
        return call


def _class_of(kind: type[BaseException], kept: dict[int, Any]) -> Encoded:
    """Encodes an exception class: the name of a builtin, else the number, name and bases."""
    if getattr(builtins, kind.__name__, None) is kind:
        return kind.__name__
    kept[id(kind)] = kind
    full = f"{kind.__module__}.{kind.__name__}"
    bases = [_class_of(each, kept) for each in kind.__bases__ if issubclass(each, BaseException)]
    return [id(kind), full, bases]


def _class(kind: Any) -> Encoded:
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        return None
    return json.dumps(_class_of(kind, {}))


def _batch(value: Any) -> Any:
    """Returns the first items of an iterable, an iterator of the rest, its length, and `has_keys`.

    Returns None for an iterator, and the exception if the value cannot be iterated.
    """
    try:
        iterator = iter(value)
        if iterator is value:
            return None
        items = list(islice(iterator, _NUM_AT_ONCE))
    except Exception as error:  # noqa: BLE001 (raised where a test iterates)
        return error
    size = len(value) if hasattr(type(value), "__len__") else None
    return [items, None if len(items) < _NUM_AT_ONCE else iterator, size, hasattr(value, "keys")]


def _raise(error: Exception) -> None:
    raise error


def _next(iterator: Any) -> Any:
    try:
        return [next(iterator)]
    except StopIteration:
        return []


def _async_items(iterable: Any) -> Any:
    """Returns all items, and an exception or None.

    All at once, since an event loop closes its generators when it ends.
    """
    items: list[Any] = []

    async def take() -> None:
        async for each in iterable:
            items.append(each)
            if len(items) > _NUM_AT_ONCE:
                raise RuntimeError(f"more than {_NUM_AT_ONCE} items")

    try:
        _run(take())
    except Exception as error:  # noqa: BLE001 (raised where a test iterates)
        return [items, error]
    return [items, None]


def _run(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


_HELPERS: dict[str, Callable[..., Any]] = {
    "batch": _batch,
    "next": _next,
    "run": _run,
    "async_items": _async_items,
    "content": content_of,
    "class": _class,
    "raise": _raise,
    "length": lambda value: len(value) if hasattr(type(value), "__len__") else None,
}
