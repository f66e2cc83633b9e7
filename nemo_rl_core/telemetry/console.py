"""Consoles for tables, as wide as the terminal and unlimited in pipes and files."""

import sys
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
