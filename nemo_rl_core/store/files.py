"""Atomic writes, syncing, deletion and hashing of files.

A file is written beside its final path under a name that ends in `ASIDE`; a folder to delete is
first renamed to end in `DISCARDED`. A killed process leaves only such names behind, so that nothing
unfinished is taken for a result.
"""

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from pathlib import Path

from nemo_rl_core.errors import StoreError

ASIDE = ".aside~"
DISCARDED = ".discarded~"

_ELSEWHERE = "point NEMO_RL_HOME at a folder that can be written"
_EXPLANATIONS = {
    errno.ENOSPC: ("no space left on the disk", "free some space, or " + _ELSEWHERE),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or " + _ELSEWHERE),
    errno.EROFS: ("the file system is mounted read-only", _ELSEWHERE),
    errno.EACCES: ("permission denied", _ELSEWHERE),
    errno.EPERM: ("permission denied", _ELSEWHERE),
    errno.ENOTDIR: ("a file is in the way of a folder", "move that file away, or " + _ELSEWHERE),
    errno.EEXIST: ("a file is in the way of a folder", "move that file away, or " + _ELSEWHERE),
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns errors of the disk (full, read-only, no permission) into a StoreError.

    Args:
        path: Named in the message if the error names no file.

    Raises:
        StoreError: For errors that a user can fix; any other OSError passes unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _EXPLANATIONS:
            raise
        reason, fix = _EXPLANATIONS[error.errno]
        raise StoreError(
            f"cannot write {error.filename or path}",
            expected="a folder that can be written and has space",
            got=reason,
            fix=fix,
        ) from error


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yields a temporary path, whose file replaces `path` on a clean exit.

    Raises:
        StoreError: If the disk refuses; `path` is then unchanged.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{ASIDE}")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            fsync(aside)
            aside.replace(path)
            fsync(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replaces a file's content atomically.

    Raises:
        StoreError: If the disk refuses; the old content then stays.
    """
    with written_aside(path) as aside:
        aside.write_bytes(data.encode() if isinstance(data, str) else data)


def fsync(path: Path) -> None:
    """Syncs a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path, *, synced: Collection[str] = ()) -> None:
    """Syncs every file and folder under `folder`, contents before the entries that name them.

    Args:
        folder: The folder.
        synced: Relative paths of files that their writers have synced.
    """
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            if Path(parent, name).relative_to(folder).as_posix() not in synced:
                fsync(Path(parent, name))
        fsync(Path(parent))


def list_files(folder: Path) -> list[str]:
    """Relative POSIX paths of every finished file below `folder`, sorted; links are followed."""
    paths = (
        Path(parent, name).relative_to(folder)
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
    )
    return sorted(path.as_posix() for path in paths if not _is_leftover(path))


def hash_file(path: Path) -> str:
    """The sha256 of a file's content, in hex.

    Raises:
        OSError: If it cannot be read, or is a pipe or device.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    tell = _told_of_hashing.get()
    with path.open("rb") as file:
        if tell is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while block := file.read(_HASHED_AT_ONCE):
            digest.update(block)
            tell(len(block))
        return digest.hexdigest()


_HASHED_AT_ONCE = 4 * 2**20
_told_of_hashing: ContextVar[Callable[[int], object] | None] = ContextVar(
    "told_of_hashing", default=None
)


@contextmanager
def while_hashing(tell: Callable[[int], object]) -> Iterator[None]:
    """Within it, `tell` is called with the size of each block that this thread hashes."""
    token = _told_of_hashing.set(tell)
    try:
        yield
    finally:
        _told_of_hashing.reset(token)


def hash_folder(
    folder: Path, *, exclude: Sequence[str] = (), hash_of: Callable[[Path], str] = hash_file
) -> str:
    """One sha256 over the relative paths and contents of a folder's files.

    Location, times, permissions, empty folders and leftovers of killed writers do not count.

    Args:
        folder: The folder to hash.
        exclude: `fnmatch` patterns for the whole relative path: `manifest.json` excludes only the
            one at the top, `*.log` files at any depth.
        hash_of: Returns the sha256 of a file's content.

    Raises:
        FileNotFoundError: If there is no such folder (an absent folder is not an empty one).
    """
    return digest_of(hash_files(folder, exclude=exclude, hash_of=hash_of))


def hash_files(
    folder: Path, *, exclude: Sequence[str] = (), hash_of: Callable[[Path], str] = hash_file
) -> dict[str, str]:
    """The sha256 of each file of a folder by its relative path; arguments as of `hash_folder`.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder to hash", str(folder))
    return {
        name: hash_of(folder / name)
        for name in list_files(folder)
        if not any(fnmatchcase(name, pattern) for pattern in exclude)
    }


def digest_of(digests: Mapping[str, str]) -> str:
    """One sha256 over relative paths and the sha256 of their contents, as `hash_folder` has it."""
    digest = hashlib.sha256()
    for name in sorted(digests):
        # A path contains any byte but NUL, and a digest has a fixed length, so that different
        # folders give different input to the hash.
        digest.update(os.fsencode(name) + b"\0" + bytes.fromhex(digests[name]))
    return digest.hexdigest()


def discard(path: Path) -> None:
    """Deletes a folder atomically: it is renamed first. Does nothing if it is missing."""
    doomed = mark_discarded(path)
    if doomed is not None:
        shutil.rmtree(doomed, ignore_errors=True)


def mark_discarded(path: Path) -> Path | None:
    """Renames a folder so that it counts as deleted; `sweep_discarded` removes it.

    Returns:
        The new path; None if the folder is missing.
    """
    doomed = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{DISCARDED}")
    try:
        return path.rename(doomed)
    except FileNotFoundError:
        return None


def sweep_discarded(parent: Path) -> None:
    """Finishes the deletions that killed processes left behind in `parent`."""
    for doomed in parent.glob(f".*{DISCARDED}"):
        # Errors are ignored, since the process that discarded it may still be deleting it.
        shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes unfinished and half-deleted files below a folder that no other process writes."""
    for path in sorted(folder.rglob(".*~")):
        if path.name.endswith((ASIDE, DISCARDED)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_leftover(relative: Path) -> bool:
    return any(part.endswith((ASIDE, DISCARDED)) for part in relative.parts)
