"""Coroutine functions called from code that does not await."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from nemo_rl_core.environments.rewards.retries import Retries

Call = Callable[[], Any]


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine."""
    called = getattr(fn, "__call__", None)  # noqa: B004 (an object's own, if it is one)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(called)


class AsyncCalls:
    """One event loop in a thread of its own, so that a notebook's running loop is no obstacle.

    The loop lives as long as this object: clients that a function opens at its first call stay
    usable at the next.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._runner: asyncio.Runner | None = None

    def results(self, calls: Sequence[Call], retries: Retries | None = None) -> list[Call]:
        """Awaits all calls side by side.

        Args:
            calls: Functions that return a coroutine.
            retries: Repeats those that fail in the network.

        Returns:
            A function for each call that returns what the call has returned, or raises what it has
            raised.
        """
        if self._thread is None:
            self._thread, self._runner = ThreadPoolExecutor(1), asyncio.Runner()
        assert self._runner is not None
        outcomes = self._thread.submit(self._runner.run, _gathered(calls, retries)).result()
        return [partial(_given, each) for each in outcomes]

    def close(self) -> None:
        """Ends loop and thread; the next call starts others."""
        if self._thread is None or self._runner is None:
            return
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()
        self._thread = self._runner = None


async def _gathered(calls: Sequence[Call], retries: Retries | None) -> list[Any]:
    return await asyncio.gather(*(_outcome(call, retries) for call in calls))


async def _outcome(call: Call, retries: Retries | None) -> Any:
    try:
        return await (call() if retries is None else retries.awaited(call))
    # Named fault boundary: raised again where the row of the call is known.
    except (Exception, SystemExit) as error:  # noqa: BLE001 (raised again)
        return _Raised(error)


class _Raised:
    """An exception as a value; one that a function returns is none of these."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _given(found: Any) -> Any:
    if isinstance(found, _Raised):
        raise found.error
    return found
