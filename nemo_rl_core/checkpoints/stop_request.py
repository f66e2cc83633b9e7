"""A request to save after the current step and to stop, for machines that are taken away soon."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_requested = threading.Event()
_listening: list[object] = []


def ask() -> bool:
    """Asks this process's training loop to save after the step and stop; False without a loop.

    May be called in a signal handler. The loop raises `KeyboardInterrupt` after the save.
    """
    if _listening:
        _requested.set()
    return bool(_listening)


def is_asked() -> bool:
    """Whether the loop should stop after the current step."""
    return _requested.is_set()


@contextmanager
def listened_to() -> Iterator[None]:
    """Marks a loop that checks `is_asked` after each step; clears the request at its end."""
    loop = object()
    _listening.append(loop)
    try:
        yield
    finally:
        _listening.remove(loop)
        _requested.clear()
