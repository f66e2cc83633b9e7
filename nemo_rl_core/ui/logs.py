"""The log of a run: its newest part, or what was written while one node ran."""

from pathlib import Path
from typing import NamedTuple

MAX_BYTES = 200_000
"""Of a log that one page shows: its newest part."""


class LogPart(NamedTuple):
    """What a page shows of a log.

    Attributes:
        text: The lines.
        left_out: How many bytes before them are not shown.
    """

    text: str
    left_out: int


def newest(
    path: Path, *, begin: int = 0, end: int | None = None, max_bytes: int = MAX_BYTES
) -> LogPart | None:
    """The newest part of a stretch of a log, from the beginning of a line.

    Args:
        path: Of the log.
        begin: The stretch's first byte.
        end: The byte after its last; None for the end of the file.
        max_bytes: At most so much is read.

    Returns:
        None where there is no such log.
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
        whole = data.find(b"\n") + 1  # one line that is longer than the part has no beginning here
        start, data = start + whole, data[whole:]
    return LogPart(data.decode("utf-8", "backslashreplace"), start - begin)
