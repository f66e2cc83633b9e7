"""A cache of file hashes by size, times and inode, one file per artifact in `cache/verified/`.

Without it, a rerun of a finished recipe would spend most of its time on hashing.
"""

import json
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from nemo_rl_core.store.files import hash_file, write_atomic

_SETTLED_NS = 2 * 10**9
"""Time resolution of some file systems: a younger file may change without a new time."""

_Entry = tuple[int, int, int, int, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]
_CACHE = TypeAdapter(dict[str, _Entry])


class HashCache:
    """Returns the sha256 of an artifact's files, without reading unchanged files again."""

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path
        self._cached = _read_cache(path)
        self._used: dict[str, _Entry] = {}

    def __call__(self, path: Path) -> str:
        """Returns the SHA-256 digest of a file of the folder, in hex."""
        name = path.relative_to(self._folder).as_posix()
        now, identity = time.time_ns(), _identity(path)
        entry = self._cached.get(name)
        is_unchanged = entry is not None and entry[:4] == identity
        digest = entry[4] if entry and is_unchanged else hash_file(path)
        is_settled = now - identity[2] > _SETTLED_NS
        if is_settled and _identity(path) == identity:
            self._used[name] = (*identity, digest)
        return digest

    def save(self) -> None:
        """Writes the hashes that were used, if they differ from the file."""
        if self._used != self._cached:
            write_atomic(self._path, json.dumps(self._used))


def _read_cache(path: Path) -> dict[str, _Entry]:
    try:
        return _CACHE.validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return {}


def _identity(path: Path) -> tuple[int, int, int, int]:
    """Size, times and inode; programs cannot set the time of the last inode change (ctime)."""
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
