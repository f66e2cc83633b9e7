"""Consoles for tables: as wide as the terminal, and never cut in a pipe or a file."""

import sys
from typing import TextIO

from rich.console import Console

_WIDTH_OF_FILES = 4096


def console_on(stream: TextIO | None = None, *, whole_lines: bool = False) -> Console:
    """A console without highlighting on a stream; None for stdout.

    rich takes 80 columns for what is no terminal, and cuts the ids of runs there.

    Args:
        stream: What is written to.
        whole_lines: Leaves lines whole on a terminal, too, which breaks them itself: rich cuts
            those of a tree.
    """
    stream = stream or sys.stdout
    width = None if stream.isatty() and not whole_lines else _WIDTH_OF_FILES
    return Console(file=stream, highlight=False, width=width)
