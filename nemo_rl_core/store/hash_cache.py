"""Digests of files that need not be read again: remembered by size, times and inode.

A rerun of a finished recipe would spend most of its time on hashing. The memory lies in
`cache/verified/`, one file an artifact: no artifact is ever written to, and without it all is read.
"""

import json
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from nemo_rl_core.store.files import hash_file, write_atomic

_SETTLED_NS = 2 * 10**9
"""File systems count time in steps, of up to 2 s: a younger file may change within its step."""

_Seen = tuple[int, int, int, int, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]
_MEMORY = TypeAdapter(dict[str, _Seen])


class RememberedHashes:
    """The sha256 of an artifact's files; a file that has not changed is not read again.

    Two processes may remember at once: each writes all that it knows in one step, and an entry is
    right for as long as size, both times and inode are the file's.

    Args:
        folder: The artifact.
        path: Where the digests are kept; one that is missing or damaged is an empty memory.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path
        self._known = _read_memory(path)
        self._seen: dict[str, _Seen] = {}

    def __call__(self, path: Path) -> str:
        """The sha256 of the content of a file of the folder, in hex."""
        name = path.relative_to(self._folder).as_posix()
        asked, identity = time.time_ns(), _identity(path)
        known = self._known.get(name)
        is_known = known is not None and known[:4] == identity
        digest = known[4] if known and is_known else hash_file(path)
        is_settled = asked - identity[2] > _SETTLED_NS
        if is_settled and _identity(path) == identity:
            self._seen[name] = (*identity, digest)
        return digest

    def save(self) -> None:
        """Keeps what was asked for since the beginning, where that is news.

        Raises:
            StoreError: If the disk refuses.
        """
        if self._seen != self._known:
            write_atomic(self._path, json.dumps(self._seen))


def _read_memory(path: Path) -> dict[str, _Seen]:
    try:
        return _MEMORY.validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return {}


def _identity(path: Path) -> tuple[int, int, int, int]:
    """Size, times and inode; no program can set the time of a file's last change of any kind."""
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
