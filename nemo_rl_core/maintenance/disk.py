"""Disk usage in allocated blocks, with hard links counted once, the same as `du`."""

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

_BLOCK = 512  # bytes; the unit of st_blocks on every file system

Inode = tuple[int, int]


class DiskUse:
    """Disk usage of several folders; each file counts once."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._seen: set[Inode] = set()

    def add(self, path: Path) -> int:
        """Adds a path without following links; returns the newly counted bytes."""
        new = 0
        for info in walk(path):
            if (inode := (info.st_dev, info.st_ino)) not in self._seen:
                self._seen.add(inode)
                new += info.st_blocks * _BLOCK
        self.num_bytes += new
        return new


def allocated(path: Path) -> int:
    """Returns the allocated bytes of a file or folder, the same as `du`."""
    return DiskUse().add(path)


class Snapshot:
    """Sizes in a folder at one moment, to compute the bytes that removals would free."""

    def __init__(self, root: Path) -> None:
        self.num_bytes = allocated(root)
        self._stats: dict[Path, list[os.stat_result]] = {}

    def freed_by(self, paths: Iterable[Path]) -> int:
        """Returns the bytes freed by removing all paths, except files with other hard links."""
        links: Counter[Inode] = Counter()
        stats: dict[Inode, os.stat_result] = {}
        for path in paths:
            for info in self._stats_of(path):
                links[info.st_dev, info.st_ino] += 1
                stats[info.st_dev, info.st_ino] = info
        return sum(
            info.st_blocks * _BLOCK
            for inode, info in stats.items()
            if stat.S_ISDIR(info.st_mode) or links[inode] >= info.st_nlink
        )

    def _stats_of(self, path: Path) -> list[os.stat_result]:
        if path not in self._stats:
            self._stats[path] = list(walk(path))
        return self._stats[path]


def newest_change(path: Path) -> float:
    """Returns the time of the last change in a folder, in Unix seconds; 0 if it is missing."""
    return max((info.st_mtime for info in walk(path)), default=0.0)


def walk(path: Path) -> Iterator[os.stat_result]:
    """Yields the `lstat` of a path and of everything below it; links are not followed."""
    try:
        info = path.lstat()
        yield info
        children = sorted(path.iterdir()) if stat.S_ISDIR(info.st_mode) else []
    except FileNotFoundError:
        return
    for each in children:
        yield from walk(each)
