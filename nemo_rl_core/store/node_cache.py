"""A cache on a node's local disk that keeps files between stages and runs, by their sha256.

    FOLDER/files/DIGEST           a complete file
    FOLDER/verified/DIGEST        its size, times and inode when its digest was last verified
    FOLDER/used/DIGEST            an empty file with the time of the last use
    FOLDER/coming/DIGEST.BYTES    locked by the process that fetches the file; reserves its size
    FOLDER/marks                  shared locks of the files in use, released with their processes

Several containers of the node use it at once, with locks of the kernel. It is optional: if it is
full, damaged or read-only, files are read from their original location.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.store import locks
from nemo_rl_core.store.files import ASIDE, hash_file, write_atomic, written_aside
from nemo_rl_core.store.manifest import read_digests

logger = logging.getLogger(__name__)

FOLDER = "NEMO_RL_NODE_CACHE"
"""Environment variable with the folder; without it nothing is cached."""

GIB = "NEMO_RL_NODE_CACHE_GIB"
"""Environment variable with the maximum size of the folder in GiB."""

_warned: set[str] = set()


class NodeCache:
    """Files on this node's disk; the least recently used ones are removed to make room."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._files, self._coming = folder / "files", folder / "coming"
        self._verified, self._used = folder / "verified", folder / "used"
        self._marks = folder / "marks"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Opens the cache that the environment names; None without one, or if it is read-only."""
        folder, gib = environment.get(FOLDER), environment.get(GIB, "")
        if not folder:
            return None
        try:
            cache = cls(Path(folder), int(float(gib) * 2**30))
            for each in (cache._files, cache._verified, cache._used, cache._coming):
                each.mkdir(parents=True, exist_ok=True)
            locks.share(cache._marks, "of this process")
        except (OSError, ValueError, OverflowError, NemoRLError) as error:
            _warn(f"{FOLDER}={folder} with {GIB}={gib} is not used, and files are fetched: {error}")
            return None
        return cache

    def mark(self, digest: str) -> None:
        """Protects the file of this sha256 from removal while this process lives."""
        locks.share(self._marks, digest)

    def bring(self, digest: str, num_bytes: int, fetch: Callable[[Path], object]) -> Path | None:
        """Returns the verified file of this content, fetched if missing; None if it is not cached.

        Call `mark` first. If several processes need a file, one of them fetches it.
        """
        path = self._files / digest
        if num_bytes > self._max_bytes:
            return None
        try:
            if self._is_intact(path):
                return path
            with self._fetch_lock(digest, num_bytes):
                if self._is_intact(path):
                    return path
                if path.exists():  # only under the lock, else it may be an older file
                    _warn(f"{path} is damaged and fetched again")
                    self._remove(path)
                if not self._has_room():
                    return None
                with written_aside(path) as aside:
                    fetch(aside)
                    if hash_file(aside) != digest:
                        raise ValueError("the fetched file has another content")
                self._note(path)
                return path
        # Broad on purpose: libraries of object stores raise errors of many classes. The caller
        # then fetches the file without the cache and gets that error.
        except Exception as error:  # noqa: BLE001
            _warn(f"{path} is fetched without the node's cache: {type(error).__name__}: {error}")
            return None

    def _is_intact(self, path: Path) -> bool:
        """Returns whether the file is present and intact; records its use.

        The digest is verified again only if the file was touched since the last time.
        """
        if not path.exists():
            return False
        verified = self._verified / path.name
        is_verified = verified.exists() and verified.read_text() == _identity(path)
        if not is_verified and hash_file(path) != path.name:
            return False
        self._note(path)
        return True

    def _note(self, path: Path) -> None:
        verified, identity = self._verified / path.name, _identity(path)
        if not verified.exists() or verified.read_text() != identity:
            write_atomic(verified, identity)
        (self._used / path.name).touch()

    @contextmanager
    def _fetch_lock(self, digest: str, num_bytes: int) -> Iterator[None]:
        """Locks a file that is being fetched; the lock's name reserves its size."""
        lock = self._coming / f"{digest}.{num_bytes}"
        with locks.locked(lock, f"download of {digest[:12]}"):
            try:
                self._sweep(digest)
                yield
            finally:
                lock.unlink(missing_ok=True)

    def _sweep(self, digest: str) -> None:
        for aside in self._files.glob(f".{digest}.*{ASIDE}"):
            aside.unlink(missing_ok=True)

    def _has_room(self) -> bool:
        with locks.locked(self._folder / "room.lock", "room in the node's cache"):
            cached = [path for path in self._files.iterdir() if not path.suffix]
            sizes = {path: path.stat().st_size for path in cached}
            taken = sum(self._pending_sizes()) + sum(sizes.values())
            for path in sorted(cached, key=self._last_use):
                if taken <= self._max_bytes:
                    break
                with locks.exclusive(self._marks, path.name) as is_free:
                    if is_free:
                        self._remove(path)
                        taken -= sizes[path]
            return taken <= self._max_bytes

    def _last_use(self, path: Path) -> int:
        used = self._used / path.name
        return used.stat().st_mtime_ns if used.exists() else 0

    def _remove(self, path: Path) -> None:
        for each in (path, self._verified / path.name, self._used / path.name):
            each.unlink(missing_ok=True)

    def _pending_sizes(self) -> Iterator[int]:
        for lock in self._coming.iterdir():
            digest, _, num_bytes = lock.name.partition(".")
            with locks.locked_if_free(lock) as is_free:
                if is_free:
                    self._sweep(digest)
                    lock.unlink(missing_ok=True)
                else:
                    yield int(num_bytes)


def on_node_disk(path: Path) -> Path:
    """Returns a copy of an artifact's file on this node's disk; the path itself without room."""
    cache = NodeCache.of(os.environ)
    if cache is None or path.is_symlink():  # a link points to the cache already
        return path
    digest = _digest_in_artifact(path)
    if digest is None:
        return path
    cache.mark(digest)
    size = path.stat().st_size
    return cache.bring(digest, size, lambda aside: shutil.copyfile(path, aside)) or path


def _digest_in_artifact(path: Path) -> str | None:
    for folder in path.parents[:3]:
        try:
            return read_digests(folder).get(path.relative_to(folder).as_posix())
        except (OSError, ValueError):
            continue
    return None


def _identity(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)
