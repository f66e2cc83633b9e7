"""The boxes in which `pyflyte run` prints errors: in a pipe or a file, as wide as their lines.

rich takes 80 columns for what is no terminal, and breaks paths there.
"""

import functools
import sys
from typing import Any

import click
from rich.cells import cell_len
from rich_click.rich_help_formatter import RichHelpFormatter

_FRAME = 6
"""Columns of the box beside its text, and of the space around it."""


def widen_error_boxes() -> None:
    """Wraps the part of rich-click that writes errors; no-op if repeated."""
    if not hasattr(RichHelpFormatter.write_error, "__wrapped__"):
        RichHelpFormatter.write_error = _wrap(  # type: ignore[method-assign]
            RichHelpFormatter.write_error
        )


def _wrap(original: Any) -> Any:
    @functools.wraps(original)
    def write_error(self: RichHelpFormatter, e: click.ClickException) -> None:
        if not sys.stderr.isatty():
            longest = max(map(cell_len, e.format_message().splitlines()), default=0)
            self.width = max(self.width, longest + _FRAME)
        original(self, e)

    return write_error
