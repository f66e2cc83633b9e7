"""A cache of file hashes, by size, times and inode.

Without it a rerun of a finished recipe would spend most of its time on hashing. It is in
`cache/verified/`, one file per artifact, as artifacts are never written to.
"""

import json
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from nemo_rl_core.store.files import hash_file, write_atomic

_SETTLED_NS = 2 * 10**9
"""File systems have time steps of up to 2 s: a younger file may change within its step."""

_Entry = tuple[int, int, int, int, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]
_CACHE = TypeAdapter(dict[str, _Entry])


class HashCache:
    """The sha256 of an artifact's files; an unchanged file is not read again.

    Two processes may use it at once: each replaces the cache file atomically, and an entry is valid
    as long as size, both times and inode are equal.

    Args:
        folder: The artifact.
        path: The cache file; a missing or damaged one counts as empty.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path
        self._known = _read_cache(path)
        self._used: dict[str, _Entry] = {}

    def __call__(self, path: Path) -> str:
        """Returns the sha256 of a file of the folder, in hex."""
        name = path.relative_to(self._folder).as_posix()
        now, identity = time.time_ns(), _identity(path)
        known = self._known.get(name)
        is_known = known is not None and known[:4] == identity
        digest = known[4] if known and is_known else hash_file(path)
        is_settled = now - identity[2] > _SETTLED_NS
        if is_settled and _identity(path) == identity:
            self._used[name] = (*identity, digest)
        return digest

    def save(self) -> None:
        """Writes the hashes that were used, if they differ from the file.

        Raises:
            StoreError: If the disk refuses.
        """
        if self._used != self._known:
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
