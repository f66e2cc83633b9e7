"""What files take on the disk, as `du` counts: allocated blocks, hard links once.

Not the apparent sizes: a sparse file takes less than its length says, and a small one a block.
"""

import os
import stat as mode
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

_BLOCK = 512  # bytes; the unit of st_blocks whatever the file system's own is

Inode = tuple[int, int]


class DiskUse:
    """The files below some folders, each once.

    Attributes:
        num_bytes: Allocated, folders included.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._seen: set[Inode] = set()

    def add(self, path: Path) -> int:
        """Counts a file, or a folder with all that is in it; returns what was not counted before.

        Links are not followed. What vanishes meanwhile takes nothing.
        """
        new = 0
        for stat in walk(path):
            if (inode := (stat.st_dev, stat.st_ino)) not in self._seen:
                self._seen.add(inode)
                new += stat.st_blocks * _BLOCK
        self.num_bytes += new
        return new


def allocated(path: Path) -> int:
    """What `du` says of a file or folder, in bytes."""
    return DiskUse().add(path)


class Snapshot:
    """A folder at one moment, for asking what would come free without parts of it.

    Args:
        root: Measured here; what is asked for later must lie below it.
    """

    def __init__(self, root: Path) -> None:
        self.num_bytes = allocated(root)
        self._stats: dict[Path, list[os.stat_result]] = {}

    def freed_by(self, paths: Iterable[Path]) -> int:
        """How many bytes come free with all these gone; a file with a link elsewhere stays."""
        links: Counter[Inode] = Counter()
        found: dict[Inode, os.stat_result] = {}
        for path in paths:
            for stat in self._of(path):
                links[stat.st_dev, stat.st_ino] += 1
                found[stat.st_dev, stat.st_ino] = stat
        return sum(
            stat.st_blocks * _BLOCK
            for inode, stat in found.items()
            if mode.S_ISDIR(stat.st_mode) or links[inode] >= stat.st_nlink
        )

    def _of(self, path: Path) -> list[os.stat_result]:
        if path not in self._stats:
            self._stats[path] = list(walk(path))
        return self._stats[path]


def newest_change(path: Path) -> float:
    """When anything in a folder was last written, in unix seconds; 0 where there is nothing."""
    return max((stat.st_mtime for stat in walk(path)), default=0.0)


def walk(path: Path) -> Iterator[os.stat_result]:
    """What the file system says of a path and of all below it; links are not followed."""
    try:
        stat = path.lstat()
        yield stat
        below = sorted(path.iterdir()) if mode.S_ISDIR(stat.st_mode) else []
    except FileNotFoundError:
        return
    for each in below:
        yield from walk(each)
