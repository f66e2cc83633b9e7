"""What files take on the disk, as `du` counts: allocated blocks, hard links once.

Not the apparent sizes: a sparse file takes less than its length says, and a small one a block.
"""

import os
import stat as mode
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = 512  # bytes; the unit of st_blocks whatever the file system's own is


@dataclass
class DiskUse:
    """The files below some folders, each once.

    Attributes:
        num_bytes: Allocated, folders included.
    """

    num_bytes: int = 0
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def add(self, path: Path) -> int:
        """Counts a file, or a folder with all that is in it; returns what was not counted before.

        Links are not followed. What vanishes meanwhile takes nothing.
        """
        new = 0
        for stat in _walk(path):
            if (stat.st_dev, stat.st_ino) not in self._seen:
                self._seen.add((stat.st_dev, stat.st_ino))
                new += stat.st_blocks * _BLOCK
        self.num_bytes += new
        return new


def allocated(path: Path) -> int:
    """What `du` says of a file or folder, in bytes."""
    return DiskUse().add(path)


def freed_by_removing(paths: Iterable[Path]) -> int:
    """How many bytes come free with all these paths gone: a file with a link elsewhere stays."""
    links: Counter[tuple[int, int]] = Counter()
    found: dict[tuple[int, int], os.stat_result] = {}
    for path in paths:
        for stat in _walk(path):
            key = (stat.st_dev, stat.st_ino)
            links[key] += 1
            found[key] = stat
    return sum(
        stat.st_blocks * _BLOCK
        for key, stat in found.items()
        if mode.S_ISDIR(stat.st_mode) or links[key] >= stat.st_nlink
    )


def newest_change(path: Path) -> float:
    """When anything in a folder was last written, in unix seconds; 0 where there is nothing."""
    return max((stat.st_mtime for stat in _walk(path)), default=0.0)


def _walk(path: Path) -> Iterator[os.stat_result]:
    try:
        stat = path.lstat()
        yield stat
        below = sorted(path.iterdir()) if mode.S_ISDIR(stat.st_mode) else []
    except (FileNotFoundError, NotADirectoryError):
        return
    for each in below:
        yield from _walk(each)
