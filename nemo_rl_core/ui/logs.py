"""The log of a run: its newest records, or those written while one node ran."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MAX_SHOWN = 200_000
"""Maximum number of characters of a log on one page."""
READ_BYTES, SEARCHED_BYTES = 1_000_000, 8_000_000
"""Size of the part that is read without and with a filter."""

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# Records of the run, and of vLLM and other libraries that print theirs.
_HEAD = re.compile(
    r"(?:\([\w :=.-]+\) )?"
    r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) \d+ (?P<logger>[\w.]+):"
    r"|(?P<printed>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d)"
)
_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_NOISY = "flytekit"


class Record(NamedTuple):
    """A record with its further lines, such as a traceback; without a level if it was printed."""

    level: str
    logger: str
    text: str


class LogPart(NamedTuple):
    """The newest records of a part of a log, in order.

    Attributes:
        is_cut: Whether the part has earlier records that were not read or not returned.
        num_noisy: Number of flytekit's records that were left out.
    """

    records: list[Record]
    is_cut: bool = False
    num_noisy: int = 0

    @property
    def text(self) -> str:
        """The records as text."""
        return "\n".join(record.text for record in self.records)

    @property
    def newest_first(self) -> str:
        """The records as text, the last one first; the lines of each keep their order."""
        return "\n".join(record.text for record in reversed(self.records))


def newest(
    path: Path,
    *,
    begin: int = 0,
    end: int | None = None,
    level: str = "",
    text: str = "",
    noisy: bool = False,
) -> LogPart | None:
    """Reads the newest records of a byte range of a log; None if it cannot be read.

    Args:
        level: Lowest level; "" for all records, also those without one.
        text: Text that a record contains, in any case.
        noisy: Whether flytekit's records below WARNING, which dump configs, are included.
    """
    num_bytes = SEARCHED_BYTES if level or text else READ_BYTES
    lines, is_cut = _lines(path, begin, end, num_bytes)
    if lines is None:
        return None
    kept: list[Record] = []
    num_noisy = size = 0
    for record in reversed(_records(lines)):
        if not noisy and _is_noisy(record):
            num_noisy += 1
            continue
        if not _passes(record, level, text.lower()):
            continue
        size += len(record.text)
        if size > MAX_SHOWN:
            is_cut = True
            if not kept:
                kept.append(record._replace(text=record.text[-MAX_SHOWN:]))
            break
        kept.append(record)
    return LogPart(kept[::-1], is_cut, num_noisy)


def _lines(
    path: Path, begin: int, end: int | None, num_bytes: int
) -> tuple[list[str] | None, bool]:
    """Returns the last lines of a byte range, and whether earlier ones were not read."""
    try:
        with path.open("rb") as file:
            length = file.seek(0, 2)
            end = length if end is None else min(end, length)
            start = max(begin, end - num_bytes)
            file.seek(start)
            data = file.read(max(0, end - start))
    except OSError:
        return None, False
    if start > begin:
        data = data[data.find(b"\n") + 1 :]  # all of it if one line is longer than the part
    text = _COLORS.sub("", data.decode("utf-8", "backslashreplace"))
    # A progress bar writes its states over each other; the last one is what was seen.
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")], start > begin


def _records(lines: Iterable[str]) -> list[Record]:
    """Joins lines to records; one without a head belongs to the record before it."""
    records: list[tuple[str, str, list[str]]] = []
    for line in lines:
        head = _HEAD.match(line)
        if head is not None:
            records.append((head["level"] or head["printed"], head["logger"] or "", [line]))
        elif records:
            records[-1][2].append(line)
        else:
            records.append(("", "", [line]))
    return [Record(level, logger, "\n".join(each)) for level, logger, each in records]


def _is_noisy(record: Record) -> bool:
    return record.logger.partition(".")[0] == _NOISY and record.level in ("DEBUG", "INFO")


def _passes(record: Record, level: str, text: str) -> bool:
    if level in LEVELS and (
        record.level not in LEVELS or LEVELS.index(record.level) < LEVELS.index(level)
    ):
        return False
    return text in record.text.lower()
