"""Prints that a command imports its libraries, since nothing else is printed for seconds.

It imports only the standard library, and is the first module that a pipeline imports.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TextIO

_TEXT = "importing libraries"
_FRAME_SECONDS = 0.5
_LINE_SECONDS = 2.0
"""Delay before a log gets its one line; a quick start needs none."""


class StartingLine:
    """A line on a stream from now until `end`.

    In a terminal it is redrawn twice a second, and the cursor stays at its beginning, so that
    other output overwrites it. Elsewhere it is one line, after two seconds.
    It also ends when `is_over`, which is called before each frame, returns True.
    """

    def __init__(self, stream: TextIO, *, is_over: Callable[[], bool] = lambda: False) -> None:
        self._stream, self._is_over = stream, is_over
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="starting", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Removes the line; idempotent."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _show(self) -> None:
        is_live, has_shown = self._stream.isatty(), False
        try:
            while not self._over.is_set() and not self._is_over():
                seconds = time.monotonic() - self._began
                if is_live:
                    clock = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
                    self._write(f"\r{_TEXT}  {clock}\r")
                elif seconds >= _LINE_SECONDS and not has_shown:
                    has_shown = True
                    self._write(f"{_TEXT} ...\n")
                self._over.wait(_FRAME_SECONDS if is_live else 0.1)
            if is_live:
                self._write("\r\x1b[K")
        except (OSError, ValueError):
            return  # the terminal went away

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


_lines: list[StartingLine] = []
"""The line of this process, if it has one."""


def begin_line(*, is_over: Callable[[], bool] = lambda: False) -> None:
    """Shows the line of this process on stderr, and makes Ctrl-C end the process with code 130.

    Before a run there is nothing to clean up, and libraries that are being imported would print
    a traceback.
    """
    if not _lines:
        _lines.append(StartingLine(sys.stderr, is_over=is_over))
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _leave)


def end_line() -> None:
    """Removes the line of this process, if there is one, before other output."""
    while _lines:
        _lines.pop().end()


def end_startup() -> None:
    """Removes the line and restores Ctrl-C, since the run begins."""
    end_line()
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def begin_for_pyflyte() -> None:
    """Shows the line if this process is `pyflyte run`, until the pipeline's module is imported."""
    arguments = sys.argv[1:]
    is_run = Path(sys.argv[0]).name == "pyflyte" and "run" in arguments[:3]
    if is_run and "--help" not in arguments:
        begin_line(is_over=_pipelines_are_imported)


def _pipelines_are_imported() -> bool:
    imported = list(sys.modules.items())
    specs = [
        getattr(module, "__spec__", None)
        for name, module in imported
        if name == "workflows" or name.startswith("workflows.")
    ]
    return len(specs) > 1 and not any(getattr(spec, "_initializing", False) for spec in specs)


def _leave(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"\r\x1b[K" if os.isatty(2) else b"")
    os.write(2, b"stopped from outside before the run began: nothing was started\n")
    os._exit(128 + number)
