"""A folder of a node's own disk that keeps files between stages and runs, known by their sha256.

    FOLDER/files/DIGEST           a whole file
    FOLDER/verified/DIGEST        its size, times and inode when it was read against its digest
    FOLDER/used/DIGEST            an empty file, whose time is that of the last use
    FOLDER/coming/DIGEST.BYTES    locked by the process that brings the file, which has its room
    FOLDER/marks                  shared locks of the files in use, released with their processes

Several containers of the node use it at once: the locks are the kernel's. It is never needed: where
it is full, damaged or cannot be written, a file is read from where it lies.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.store import locks, partial
from nemo_rl_core.store.files import ASIDE, hash_file, write_atomic, written_aside

logger = logging.getLogger(__name__)

FOLDER = "NEMO_RL_NODE_CACHE"
"""The variable with the folder; without it nothing is kept."""

GIB = "NEMO_RL_NODE_CACHE_GIB"
"""The variable with the size that the folder may have."""

_warned: set[str] = set()


class NodeCache:
    """Files on this node's disk, the oldest of which go where there is no room.

    Args:
        folder: Made where it is missing.
        max_bytes: Of all files together, those that are on their way among them.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._files, self._coming = folder / "files", folder / "coming"
        self._verified, self._used = folder / "verified", folder / "used"
        self._marks = folder / "marks"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """That of the environment's variables; None where there is none, or it cannot be written.

        Args:
            environment: Such as `os.environ`.
        """
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
        """Keeps a file of this sha256 from being removed, as long as this process lives."""
        locks.share(self._marks, digest)

    def bring(self, digest: str, num_bytes: int, fetch: Callable[[Path], object]) -> Path | None:
        """The file of this content; it is fetched where it is not here yet.

        Call `mark` first. Of several processes that want a file, one fetches it.

        Args:
            digest: The sha256 of its content, in hex.
            num_bytes: Its size.
            fetch: Writes it into the path that it is given.

        Returns:
            The file, whose content was verified; None where it cannot be kept here.
        """
        path = self._files / digest
        if num_bytes > self._max_bytes:
            return None
        try:
            if self._is_whole(path):
                return path
            with self._on_its_way(digest, num_bytes):
                if self._is_whole(path):
                    return path
                if path.exists():  # only here: who does not hold the lock may look at an older one
                    _warn(f"{path} is damaged, and fetched again")
                    self._remove(path)
                if not self._has_room():
                    return None
                with written_aside(path) as aside:
                    fetch(aside)
                    if hash_file(aside) != digest:
                        raise ValueError("what was fetched has another content")
                self._note(path)
                return path
        # Named fault boundary: an object store's library raises errors of many classes. Whoever
        # asked fetches the file without the cache then, and gets the error of that.
        except Exception as error:  # noqa: BLE001
            _warn(f"{path} is fetched past the node's cache: {type(error).__name__}: {error}")
            return None

    def _is_whole(self, path: Path) -> bool:
        """Whether the file is here with its content, which is then its last use.

        It is read against its digest where anything has touched it since that was done last.
        """
        if not path.exists():
            return False
        known = self._verified / path.name
        is_known = known.exists() and known.read_text() == _identity(path)
        if not is_known and hash_file(path) != path.name:
            return False
        self._note(path)
        return True

    def _note(self, path: Path) -> None:
        """Records that a file has been verified, and is used."""
        known, now = self._verified / path.name, _identity(path)
        if not known.exists() or known.read_text() != now:
            write_atomic(known, now)
        (self._used / path.name).touch()

    @contextmanager
    def _on_its_way(self, digest: str, num_bytes: int) -> Iterator[None]:
        """Holds the lock of a file, by whose name its bytes count as taken."""
        lock = self._coming / f"{digest}.{num_bytes}"
        with locks.held(lock, f"download of {digest[:12]}"):
            try:
                self._sweep(digest)
                yield
            finally:
                lock.unlink(missing_ok=True)

    def _sweep(self, digest: str) -> None:
        """Removes what a killed process has left of a file, whose lock this one holds."""
        for aside in self._files.glob(f".{digest}.*{ASIDE}"):
            aside.unlink(missing_ok=True)

    def _has_room(self) -> bool:
        """Removes the oldest files that no process uses, until all fits that is to come."""
        with locks.held(self._folder / "room.lock", "room in the node's cache"):
            found = [path for path in self._files.iterdir() if not path.suffix]
            sizes = {path: path.stat().st_size for path in found}
            taken = sum(self._taken()) + sum(sizes.values())
            for path in sorted(found, key=self._last_use):
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

    def _taken(self) -> Iterator[int]:
        """Bytes of the files on their way; those of killed processes are removed."""
        for lock in self._coming.iterdir():
            digest, _, num_bytes = lock.name.partition(".")
            with locks.held_if_free(lock) as is_free:
                if is_free:
                    self._sweep(digest)
                    lock.unlink(missing_ok=True)
                else:
                    yield int(num_bytes)


def near(path: Path) -> Path:
    """The same file on this node's disk, for files of an artifact on a volume that is shared.

    Args:
        path: Of an artifact, whose digests lie in its folder.

    Returns:
        The path itself where this node has no cache, or no room.
    """
    cache = NodeCache.of(os.environ)
    if cache is None or path.is_symlink():  # a link leads to the cache already
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
            return partial.read_digests(folder).get(path.relative_to(folder).as_posix())
        except (OSError, ValueError):
            continue
    return None


def _identity(path: Path) -> str:
    """Size, times and inode, by which a file that was touched is known."""
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _warn(text: str) -> None:
    """Logs a text once in a process."""
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)
