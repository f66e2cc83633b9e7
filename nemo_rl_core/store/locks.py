"""Locks that the kernel releases when their process ends or is killed.

Work is locked exclusively, with one file each. Artifacts in use have shared locks: one byte per
name in one file of the store. They belong to the open file, not to the process (`F_OFD_SETLK`,
Linux), so they also work between two users within one process.
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
    # A lock lasts while any process has the file open. A pool worker that outlives its killed
    # parent would keep it forever; closing the copy here does not release the parent's lock.
    for descriptor in _open_locks:
        os.close(descriptor)
    _open_locks.clear()
    _shared.clear()


os.register_at_fork(after_in_child=_forget_locks_in_child)


@contextmanager
def locked(path: Path, stage: str) -> Iterator[None]:
    """Locks a file for the body; waits while another process has the lock."""
    lock = _acquire(path, stage)
    try:
        with storage_errors(path):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        _close(lock)


@contextmanager
def locked_if_free(path: Path) -> Iterator[bool]:
    """Locks a file for the body if it is free; yields whether it was free."""
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
    """Marks a name as used by this process until it ends or calls `release`."""
    lock = _shared.get(path)
    if lock is None or not _is_at(lock, path):
        lock = _shared[path] = _open(path)
    fcntl.fcntl(lock, fcntl.F_OFD_SETLKW, _one_byte(fcntl.F_RDLCK, name))


def unshare(path: Path) -> None:
    """Removes all marks of this process (`share`) from a file."""
    lock = _shared.pop(path, None)
    if lock is not None:
        _close(lock)


@contextmanager
def exclusive(path: Path, name: str) -> Iterator[bool]:
    """Locks a name exclusively; yields False if any process, including this one, uses it."""
    lock = _open(path)
    try:
        try:
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _one_byte(fcntl.F_WRLCK, name))
            free = True
        except BlockingIOError:
            free = False
        yield free
    finally:
        _close(lock)


def is_shared(path: Path, name: str) -> bool:
    """Returns whether any process, including this one, uses a name; writes nothing."""
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


def _one_byte(kind: int, name: str) -> bytes:
    # A collision of two names (1 in 2**56) would only keep both.
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
    if lock in _open_locks:  # else this is a forked child, which closed it already
        _open_locks.remove(lock)
        os.close(lock)


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False
