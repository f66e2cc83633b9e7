"""The log of a run: its newest part, or the part written while one node ran."""

from pathlib import Path
from typing import NamedTuple

MAX_BYTES = 200_000
"""The largest part of a log that one page shows."""


class LogPart(NamedTuple):
    """A part of a log.

    Attributes:
        text: The lines.
        left_out: Number of bytes before them that are not shown.
    """

    text: str
    left_out: int


def newest(
    path: Path, *, begin: int = 0, end: int | None = None, max_bytes: int = MAX_BYTES
) -> LogPart | None:
    """Reads the newest part of a byte range of a log, from the beginning of a line.

    Args:
        path: The log file.
        begin: First byte of the range.
        end: Byte after the last; None for the end of the file.
        max_bytes: The most to read.

    Returns:
        None if the log cannot be read.
    """
    try:
        with path.open("rb") as file:
            length = file.seek(0, 2)
            end = length if end is None else min(end, length)
            start = max(begin, end - max_bytes)
            file.seek(start)
            data = file.read(max(0, end - start))
    except OSError:
        return None
    if start > begin:
        whole = data.find(b"\n") + 1  # 0 if one line is longer than the part
        start, data = start + whole, data[whole:]
    return LogPart(data.decode("utf-8", "backslashreplace"), start - begin)
