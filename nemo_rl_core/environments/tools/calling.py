"""Calls of tools: checks of arguments, threads, and time limits."""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from nemo_rl_core.errors import NemoRLError, RewardError

T = TypeVar("T")
Schema = dict[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name": ..., ...}}`."""
Function = Callable[..., Any]
"""A tool's function, whose result may be awaitable; an exception is an answer to the policy."""


_MAX_LEFT = 256
_left: set[threading.Thread] = set()
"""Threads of calls that nobody waits for any more, such as those that have timed out."""


class BrokenToolError(NemoRLError):
    """A tool that cannot be called any more, which is not the policy's fault."""


def name_of(schema: Mapping[str, Any]) -> str:
    """Returns the name of a tool."""
    return str(schema["function"]["name"])


async def invoke(function: Function, arguments: Mapping[str, Any]) -> Any:
    """Calls a function in a thread, or awaits a coroutine function."""
    if not inspect.iscoroutinefunction(function):
        result = await in_thread(partial(function, **arguments))
        return await result if inspect.isawaitable(result) else result
    try:
        return await function(**arguments)
    except SystemExit as error:  # it would end the event loop
        raise RuntimeError(f"exit({error.code})") from error


async def in_thread(call: Callable[[], T]) -> T:
    """Runs a blocking call in a daemon thread, so that one that hangs cannot block the exit.

    Raises:
        RewardError: If too many calls still run that nobody waits for.
    """
    if len(_left) >= _MAX_LEFT:
        _left.difference_update([each for each in _left if not each.is_alive()])
    if len(_left) >= _MAX_LEFT:
        raise RewardError(
            f"{_MAX_LEFT} calls of tools that have timed out are still running",
            expected="tools that end soon after environment.call_timeout_seconds",
            fix="give what the tool waits for, such as a request, a separate time limit",
        )
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def finish(setter: Callable[[Any], None], value: Any) -> None:
        def unless_cancelled() -> None:
            if not result.done():
                setter(value)

        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(unless_cancelled)

    def run() -> None:
        try:
            value = call()
        # Broad on purpose: the coroutine raises it.
        except BaseException as error:  # noqa: BLE001 (raised by the coroutine)
            # A future cannot raise StopIteration, and others would end more than this call.
            is_usual = isinstance(error, Exception) and not isinstance(error, StopIteration)
            finish(result.set_exception, error if is_usual else RuntimeError(repr(error)))
        else:
            finish(result.set_result, value)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        return await result
    except asyncio.CancelledError:
        _left.add(thread)
        raise


def misfit(schema: Schema, function: Function, arguments: Any) -> str | None:
    """Returns what is wrong with the arguments of a call, for the policy; None if they fit."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    if not isinstance(arguments, Mapping):
        return f"arguments must be an object with {', '.join(properties) or 'no keys'}"
    # The schemas of transformers write None as `nullable`, which JSON Schema does not know.
    checked = {
        name: value
        for name, value in arguments.items()
        if value is not None or not properties.get(name, {}).get("nullable")
    }
    if error := best_match(Draft202012Validator(parameters).iter_errors(checked)):
        return f"{'.'.join(map(str, error.path)) or 'arguments'}: {error.message}"
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # a function in C without a signature
        return None
    return None


def from_json(text: Any) -> Any:
    """Returns the value of a JSON text; other values unchanged."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def as_text(value: Any) -> str:
    """Returns a result as the text that the policy reads: JSON unless it is a text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode(errors="replace").decode()  # without lone surrogates
