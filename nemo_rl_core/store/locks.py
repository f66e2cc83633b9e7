"""Locks that the kernel releases when their process ends, killed or not.

There are two kinds. Work is locked exclusively: one lock file each, which contains the id of the
process. Artifacts in use are locked shared: one byte per name in one file of the store, so that a
run with a thousand artifacts has one file open. The bytes are locked for the open file, not for the
process (`F_OFD_SETLK`, Linux), so that locks also work between two users within one process.
"""

import fcntl
import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_core.store.files import storage_errors

logger = logging.getLogger(__name__)

_open_locks: set[int] = set()
_shared: dict[Path, int] = {}


def _forget_locks_in_child() -> None:
    # A lock lasts as long as any process has the file open. A worker of a pool that outlives its
    # killed parent would keep it for ever; closing the copy here does not release the parent's.
    for descriptor in _open_locks:
        os.close(descriptor)
    _open_locks.clear()
    _shared.clear()


os.register_at_fork(after_in_child=_forget_locks_in_child)


@contextmanager
def held(path: Path, stage: str) -> Iterator[None]:
    """Holds a lock file, after waiting for its holder.

    Args:
        path: The lock file; created if missing.
        stage: Name of the stage, logged when this process must wait.
    """
    lock = _acquire(path, stage)
    try:
        with storage_errors(path):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        _close(lock)


@contextmanager
def held_if_free(path: Path) -> Iterator[bool]:
    """Holds a lock file if it is free; yields whether it is held."""
    lock = _open(path)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = _is_at(lock, path)
        except BlockingIOError:
            free = False
        yield free
    finally:
        _close(lock)


def share(path: Path, name: str) -> None:
    """Marks a name as used by this process until it ends or calls `release`.

    Waits while another process holds it by `exclusive`, which takes a moment.

    Args:
        path: The file of the store with all marks.
        name: Name of the used artifact or run.
    """
    lock = _shared.get(path)
    if lock is None or not _is_at(lock, path):
        lock = _shared[path] = _open(path)
    _lock_byte(lock, fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, name)


def unshare(path: Path) -> None:
    """Removes all marks that this process has set by `share` in a file."""
    lock = _shared.pop(path, None)
    if lock is not None:
        _close(lock)


@contextmanager
def exclusive(path: Path, name: str) -> Iterator[bool]:
    """Locks a name exclusively; yields False if any process, this one included, uses it.

    Args:
        path: The file of the store with all marks.
        name: Name of the artifact or run.
    """
    lock = _open(path)
    try:
        try:
            _lock_byte(lock, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, name)
            free = True
        except BlockingIOError:
            free = False
        yield free
    finally:
        _close(lock)


def is_shared(path: Path, name: str) -> bool:
    """True if any process, this one included, uses a name; writes nothing."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        answer = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _one_byte(fcntl.F_WRLCK, name))
    finally:
        os.close(lock)
    kind: int = struct.unpack_from("h", answer)[0]
    return kind != fcntl.F_UNLCK


def _lock_byte(lock: int, command: int, kind: int, name: str) -> None:
    fcntl.fcntl(lock, command, _one_byte(kind, name))


def _one_byte(kind: int, name: str) -> bytes:
    # A collision of two names (one pair in 2**56) would only keep both of them.
    offset = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, offset, 1, 0)


def _acquire(path: Path, stage: str) -> int:
    while True:
        lock = _open(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode().strip() or "unknown"
            logger.warning("%s: waiting for process %s, which runs the same stage", stage, holder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_at(lock, path):
            return lock
        _close(lock)  # the file was removed while this process waited: the lock has no effect


def _open(path: Path) -> int:
    with storage_errors(path):
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    _open_locks.add(lock)
    return lock


def _close(lock: int) -> None:
    if lock in _open_locks:  # else this is a forked child, where it is closed already
        _open_locks.remove(lock)
        os.close(lock)


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False
