"""Atomic writes, syncing, deletion and hashing of files.

Unfinished files end in `ASIDE` and folders to delete in `DISCARDED`, so that a killed process
leaves nothing that could be mistaken for a result.
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
    """Turns errors of the disk (full, read-only, no permission) into a StoreError."""
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
    """Yields a temporary path, whose file replaces `path` on a clean exit."""
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
    """Replaces a file's content atomically."""
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
    """Syncs every file except `synced`, and then the folders that list them."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            if Path(parent, name).relative_to(folder).as_posix() not in synced:
                fsync(Path(parent, name))
        fsync(Path(parent))


def list_files(folder: Path) -> list[str]:
    """Returns sorted relative POSIX paths of finished files below `folder`; follows links."""
    paths = (
        Path(parent, name).relative_to(folder)
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
    )
    return sorted(path.as_posix() for path in paths if not _is_leftover(path))


def hash_file(path: Path) -> str:
    """Returns the SHA-256 digest of a file's content, in hex; refuses pipes and devices."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    report = _hashing_report.get()
    with path.open("rb") as file:
        if report is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while block := file.read(_HASHED_AT_ONCE):
            digest.update(block)
            report(len(block))
        return digest.hexdigest()


_HASHED_AT_ONCE = 4 * 2**20
_hashing_report: ContextVar[Callable[[int], object] | None] = ContextVar(
    "hashing_report", default=None
)


@contextmanager
def while_hashing(report: Callable[[int], object]) -> Iterator[None]:
    """Calls `report` with the size of each block that this thread hashes in the body."""
    token = _hashing_report.set(report)
    try:
        yield
    finally:
        _hashing_report.reset(token)


def hash_folder(
    folder: Path, *, exclude: Sequence[str] = (), hash_of: Callable[[Path], str] = hash_file
) -> str:
    """Returns one sha256 over the relative paths and contents of a folder's files.

    Location, times, permissions, empty folders and leftovers of killed writers do not count.
    `exclude` has `fnmatch` patterns for the full relative path: `manifest.json` excludes only the
    top-level one, `*.log` files at any depth.
    """
    return digest_of(hash_files(folder, exclude=exclude, hash_of=hash_of))


def hash_files(
    folder: Path, *, exclude: Sequence[str] = (), hash_of: Callable[[Path], str] = hash_file
) -> dict[str, str]:
    """Returns the sha256 of each file by its relative path; arguments as in `hash_folder`."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder to hash", str(folder))
    return {
        name: hash_of(folder / name)
        for name in list_files(folder)
        if not any(fnmatchcase(name, pattern) for pattern in exclude)
    }


def digest_of(digests: Mapping[str, str]) -> str:
    """Combines the sha256 of files by relative path into the hash of `hash_folder`."""
    digest = hashlib.sha256()
    for name in sorted(digests):
        # Paths contain no NUL and digests have a fixed length, so different folders give
        # different inputs to the hash.
        digest.update(os.fsencode(name) + b"\0" + bytes.fromhex(digests[name]))
    return digest.hexdigest()


def discard(path: Path) -> None:
    """Deletes a folder atomically: it is renamed first. Does nothing if it is missing."""
    discarded = mark_discarded(path)
    if discarded is not None:
        shutil.rmtree(discarded, ignore_errors=True)


def mark_discarded(path: Path) -> Path | None:
    """Renames an existing folder so that it counts as deleted; `sweep_discarded` removes it."""
    discarded = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{DISCARDED}")
    try:
        return path.rename(discarded)
    except FileNotFoundError:
        return None


def sweep_discarded(parent: Path) -> None:
    """Finishes deletions in `parent` that killed processes began."""
    for discarded in parent.glob(f".*{DISCARDED}"):
        # The process that discarded it may still be deleting it.
        shutil.rmtree(discarded, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes unfinished and half-deleted files below a folder without other writers."""
    for path in sorted(folder.rglob(".*~")):
        if path.name.endswith((ASIDE, DISCARDED)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_leftover(relative: Path) -> bool:
    return any(part.endswith((ASIDE, DISCARDED)) for part in relative.parts)
