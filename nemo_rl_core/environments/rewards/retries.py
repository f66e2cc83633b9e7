"""Retries of calls that fail in the network."""

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 8.0
_MAX_GIVEN_UP_IN_A_ROW: Final = 8
"""Number of consecutive failed calls after which the server counts as down."""
_BUSY: Final = frozenset({408, 409, 425, 429})
_TRANSIENT: Final = frozenset(
    {
        "aiohttp.ClientConnectionError",
        "aiohttp.ClientPayloadError",
        "anthropic.APIConnectionError",
        "http.HTTPException",
        "httpx.TransportError",
        "openai.APIConnectionError",
        "requests.ChunkedEncodingError",
        "requests.ConnectionError",
        "requests.Timeout",
        "urllib.ContentTooShortError",
        "urllib.URLError",
        "urllib3.MaxRetryError",
        "urllib3.NewConnectionError",
        "urllib3.ProtocolError",
        "urllib3.TimeoutError",
    }
)
"""Package and class of exceptions of clients that mean a failed connection or a time-out."""
_PERMANENT: Final = frozenset({"httpx.UnsupportedProtocol", "httpx.LocalProtocolError"})

_num_retries = 0


def num_retries() -> int:
    """Returns the number of retries of this process so far."""
    return _num_retries


def count_retries(number: int) -> None:
    """Adds retries of this process or of its actors."""
    global _num_retries  # noqa: PLW0603 (one count per process)
    _num_retries += number


def is_transient(error: BaseException) -> bool:
    """Whether a failure of the network may be temporary.

    Failed connections, time-outs, and the HTTP statuses 408, 409, 425, 429 and 5xx are temporary.
    An exception that was raised from another (`raise ... from error`) is classified by the other
    one.
    """
    status = _status(error)
    if status is not None:
        return status in _BUSY or 500 <= status < 600
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if names & _PERMANENT:
        return False
    if names & _TRANSIENT or isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return True
    return error.__cause__ is not None and is_transient(error.__cause__)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    for holder, name in ((error, "status_code"), (response, "status_code"), (error, "status")):
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status
    # Only urllib, since `code` means other things elsewhere.
    code = getattr(error, "code", None)
    return code if type(error).__module__ == "urllib.error" and isinstance(code, int) else None


class Retries:
    """Retries calls that fail in the network, with exponential backoff.

    No attempt starts after `num_retries` others, or `total_seconds` after the first.
    """

    def __init__(self, num_retries: int = 4, *, total_seconds: float = 30.0) -> None:
        self._num_retries, self._total_seconds = num_retries, total_seconds
        self._num_given_up = 0
        # Not the global generator, which a reward may have seeded.
        self._random = random.Random()

    def begin(self) -> None:
        """Starts a new set of calls: a server that was down may be up again."""
        self._num_given_up = 0

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function with retries, and returns its result."""
        started, attempt = time.monotonic(), 0
        while True:
            try:
                return self._succeeded(function())
            except Exception as error:
                pause = self._pause(error, attempt, started)
                if pause is None:
                    raise
            attempt += 1
            time.sleep(pause)

    async def awaited(self, function: Callable[[], Awaitable[T]]) -> T:
        """Calls a coroutine function with retries, and returns its result."""
        started, attempt = time.monotonic(), 0
        while True:
            try:
                return self._succeeded(await function())
            except Exception as error:
                pause = self._pause(error, attempt, started)
                if pause is None:
                    raise
            attempt += 1
            await asyncio.sleep(pause)

    def _succeeded(self, result: T) -> T:
        self._num_given_up = 0
        return result

    def _pause(self, error: Exception, attempt: int, started: float) -> float | None:
        """Returns the seconds until the next attempt, or None if there is none."""
        if not is_transient(error):
            return None
        # Jitter, so that calls that failed together are not retried together.
        longest = min(_FIRST_PAUSE_SECONDS * 2.0**attempt, _LONGEST_PAUSE_SECONDS)
        pause = longest * self._random.uniform(0.5, 1.0)
        is_late = time.monotonic() + pause - started > self._total_seconds
        is_down = self._num_given_up >= _MAX_GIVEN_UP_IN_A_ROW
        if attempt == self._num_retries or is_late or is_down:
            self._num_given_up += 1
            error.add_note(f"after {attempt + 1} attempts" if attempt else "not tried again")
            return None
        count_retries(1)
        return pause
