"""The log of a run: its newest part, or the part written while one node ran."""

from pathlib import Path
from typing import NamedTuple

MAX_BYTES = 200_000
"""Maximum size of the part of a log on one page."""


class LogPart(NamedTuple):
    """The lines of a part of a log, and the number of preceding bytes that are not shown."""

    text: str
    left_out: int


def newest(
    path: Path, *, begin: int = 0, end: int | None = None, max_bytes: int = MAX_BYTES
) -> LogPart | None:
    """Reads the newest lines of a byte range of a log; None if it cannot be read."""
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
        line_start = data.find(b"\n") + 1  # 0 if one line is longer than the part
        start, data = start + line_start, data[line_start:]
    return LogPart(data.decode("utf-8", "backslashreplace"), start - begin)
