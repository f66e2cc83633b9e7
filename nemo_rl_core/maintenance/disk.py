"""Disk usage as `du` counts it: allocated blocks, hard links once.

Apparent sizes differ: a sparse file takes less than its length, and a small one takes a block.
"""

import os
import stat as mode
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

_BLOCK = 512  # bytes; the unit of st_blocks on every file system

Inode = tuple[int, int]


class DiskUse:
    """Disk usage of several folders; each file counts once.

    Attributes:
        num_bytes: Allocated bytes, folders included.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._seen: set[Inode] = set()

    def add(self, path: Path) -> int:
        """Adds a file, or a folder with its content; returns the bytes not counted before.

        Symbolic links are not followed. A file that vanishes meanwhile counts 0.
        """
        new = 0
        for stat in walk(path):
            if (inode := (stat.st_dev, stat.st_ino)) not in self._seen:
                self._seen.add(inode)
                new += stat.st_blocks * _BLOCK
        self.num_bytes += new
        return new


def allocated(path: Path) -> int:
    """Returns the allocated bytes of a file or folder, as `du` does."""
    return DiskUse().add(path)


class Snapshot:
    """Sizes in a folder at one moment, to compute the bytes that removals would free.

    Args:
        root: The folder; later paths must be below it.
    """

    def __init__(self, root: Path) -> None:
        self.num_bytes = allocated(root)
        self._stats: dict[Path, list[os.stat_result]] = {}

    def freed_by(self, paths: Iterable[Path]) -> int:
        """Bytes that removing all paths frees; a file with a hard link elsewhere is not freed."""
        links: Counter[Inode] = Counter()
        found: dict[Inode, os.stat_result] = {}
        for path in paths:
            for stat in self._stats_of(path):
                links[stat.st_dev, stat.st_ino] += 1
                found[stat.st_dev, stat.st_ino] = stat
        return sum(
            stat.st_blocks * _BLOCK
            for inode, stat in found.items()
            if mode.S_ISDIR(stat.st_mode) or links[inode] >= stat.st_nlink
        )

    def _stats_of(self, path: Path) -> list[os.stat_result]:
        if path not in self._stats:
            self._stats[path] = list(walk(path))
        return self._stats[path]


def newest_change(path: Path) -> float:
    """Time of the last change in a folder, in Unix seconds; 0 if it is missing."""
    return max((stat.st_mtime for stat in walk(path)), default=0.0)


def walk(path: Path) -> Iterator[os.stat_result]:
    """Yields the `lstat` of a path and of everything below it; links are not followed."""
    try:
        stat = path.lstat()
        yield stat
        below = sorted(path.iterdir()) if mode.S_ISDIR(stat.st_mode) else []
    except FileNotFoundError:
        return
    for each in below:
        yield from walk(each)
