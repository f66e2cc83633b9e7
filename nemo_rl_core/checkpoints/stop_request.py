"""A request to save after the current step and to stop, for machines that are taken away soon."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_asked = threading.Event()
_listening: list[object] = []


def ask() -> bool:
    """Asks the loop of steps that runs in this process to save after its step, and to stop.

    May be called in a signal handler. The loop raises `KeyboardInterrupt` when the save is whole.

    Returns:
        False if no loop runs; nothing is asked then.
    """
    if _listening:
        _asked.set()
    return bool(_listening)


def is_asked() -> bool:
    """Returns whether the loop is to stop after its step."""
    return _asked.is_set()


@contextmanager
def listened_to() -> Iterator[None]:
    """Within it a loop looks at `is_asked` after each step; a request ends with it."""
    me = object()
    _listening.append(me)
    try:
        yield
    finally:
        _listening.remove(me)
        _asked.clear()
