"""Consoles for tables, and commands and paths of this machine as a user would write them."""

import os
import shutil
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console

_WIDTH_OF_FILES = 4096


def console_on(stream: TextIO | None = None, *, whole_lines: bool = False) -> Console:
    """Returns a console without highlighting on a stream, by default stdout.

    Outside of terminals, rich assumes 80 columns, which would truncate the ids of runs. With
    `whole_lines`, terminals wrap the lines of a tree instead of rich truncating them.
    """
    stream = stream or sys.stdout
    width = None if stream.isatty() and not whole_lines else _WIDTH_OF_FILES
    return Console(file=stream, highlight=False, width=width)


def program() -> str:
    """Returns how to call the `nemo-rl` next to this Python: by name if `PATH` leads to it."""
    path = Path(sys.executable).with_name("nemo-rl")
    return short_command(path) if path.exists() else path.name


def short_command(path: Path) -> str:
    """Returns how to call a program: by name if `PATH` leads to it, else by a short path."""
    return path.name if shutil.which(path.name) == str(path) else short_path(path)


def short_path(path: Path | str) -> str:
    """Returns a path relative to the working directory if it is below, or else with `~` for home.

    Example:
        >>> short_path(Path.cwd() / "runs" / "a"), short_path(Path.home() / "b"), short_path("/c")
        ('runs/a', '~/b', '/c')
    """
    for folder, start in ((Path.cwd(), ""), (Path.home(), "~/")):
        if folder != Path("/") and Path(path).is_relative_to(folder):
            return start + os.fspath(Path(path).relative_to(folder))
    return os.fspath(path)
