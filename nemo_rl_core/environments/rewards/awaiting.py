"""Calls coroutine functions from synchronous code."""

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
    call_method = getattr(fn, "__call__", None)  # noqa: B004 (the method of a callable object)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(call_method)


class AsyncCalls:
    """Event loop in a separate thread, which also works inside the running loop of a notebook.

    The loop lives as long as this object, so that clients that a function opens in one call can be
    used in the next.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._runner: asyncio.Runner | None = None

    def results(self, calls: Sequence[Call], retries: Retries | None = None) -> list[Call]:
        """Awaits all calls concurrently, with retries of those that fail in the network.

        Returns one function per call, which returns the call's result or raises its exception.
        """
        if self._thread is None:
            self._thread, self._runner = ThreadPoolExecutor(1), asyncio.Runner()
        assert self._runner is not None
        outcomes = self._thread.submit(self._runner.run, _gathered(calls, retries)).result()
        return [partial(_returned_or_raised, each) for each in outcomes]

    def close(self) -> None:
        """Ends the loop and the thread; the next call starts new ones."""
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
    # Broad on purpose: raised again where the row of the call is known.
    except (Exception, SystemExit) as error:  # noqa: BLE001 (raised again)
        return _Raised(error)


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _returned_or_raised(outcome: Any) -> Any:
    if isinstance(outcome, _Raised):
        raise outcome.error
    return outcome
