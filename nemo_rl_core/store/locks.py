"""Locks that the kernel gives back when their process ends, killed or not.

Two kinds. Work is held by one process at a time: a lock file each, which says who holds it. What
a process only reads is shared by many: one byte a name in one file of the store, so that a run
with a thousand artifacts has one file open. The bytes are locked for the open file, not for the
process (`F_OFD_SETLK`, Linux): such locks keep apart two users within one process, too.
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
    # A lock lasts as long as any process has it open. A pool's worker that outlives its killed
    # parent would keep it for ever; closing the copy here takes nothing from the parent.
    for descriptor in _open_locks:
        os.close(descriptor)
    _open_locks.clear()
    _shared.clear()


os.register_at_fork(after_in_child=_forget_locks_in_child)


@contextmanager
def held(path: Path, stage: str) -> Iterator[None]:
    """Holds a lock file, waiting for whoever has it.

    Args:
        path: The lock file; created where there is none.
        stage: What it is held for, named in the log when this process must wait.
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
    """Holds a lock file if nobody else does; yields whether it is held."""
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
    """Marks a name as used by this process until it ends, or `release` is called.

    Args:
        path: The file of the store that all such marks are in.
        name: Of what is used. Waits while another process has it `alone`, which is a moment.
    """
    lock = _shared.get(path)
    if lock is None or not _is_at(lock, path):
        lock = _shared[path] = _open(path)
    _lock_byte(lock, fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, name)


def release(path: Path) -> None:
    """Ends all marks that this process has set by `share` in that file."""
    lock = _shared.pop(path, None)
    if lock is not None:
        _close(lock)


@contextmanager
def alone(path: Path, name: str) -> Iterator[bool]:
    """Keeps others from using a name; yields False where somebody uses it, this process included.

    Args:
        path: The file of the store that all marks are in.
        name: Of what is to be used by nobody.
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
    """Whether any process, this one included, uses a name; writes nothing."""
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
    # Two names that share a byte, one pair in 2**56, would only be kept together.
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
        _close(lock)  # whoever cleared the store removed the file meanwhile: this lock keeps nobody


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
