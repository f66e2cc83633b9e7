"""Marks of artifacts in use: shared, exclusive, and released by the kernel."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_core.store import locks
from nemo_rl_core.store.store import Store

Spawn = Callable[..., "subprocess.Popen[str]"]

USER = """
import os, sys, time
from pathlib import Path
from nemo_rl_core.store.store import Store
store = Store(Path(sys.argv[1]))
assert store.hold(store.artifacts / "sft-1")
child = os.fork() if "fork" in sys.argv else 0
if child or "fork" not in sys.argv:
    print(child or "locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "home")
    (store.artifacts / "sft-1").mkdir(parents=True)
    return store


def _is_free(store: Store, name: str = "artifacts/sft-1") -> bool:
    with locks.exclusive(store.marks, name) as free:
        return free


def test_many_processes_share_a_mark_and_names_are_independent(store: Store, spawn: Spawn) -> None:
    assert not locks.is_shared(store.marks, "artifacts/sft-1"), "there is no file of marks yet"
    assert not store.marks.exists()
    users = [spawn(USER, store.root) for _ in range(2)]
    for user in users:
        assert user.stdout is not None
        assert user.stdout.readline() == "locked\n"
    assert locks.is_shared(store.marks, "artifacts/sft-1")
    assert not _is_free(store)
    assert _is_free(store, "artifacts/sft-2")
    users[0].kill()
    users[0].wait()
    assert not _is_free(store)
    users[1].kill()
    users[1].wait()
    assert _is_free(store), "the kernel gives it back"
    assert store.marks.stat().st_size == 0


def test_a_process_cannot_lock_what_it_uses_itself(store: Store) -> None:
    assert store.hold(store.artifacts / "sft-1")
    assert not _is_free(store)
    store.release()
    assert _is_free(store)
    store.release()  # a second call does nothing


def test_missing_folders_and_folders_elsewhere_are_not_locked(store: Store, tmp_path: Path) -> None:
    assert not store.hold(store.artifacts / "sft-2")
    assert store.hold(tmp_path)
    assert not store.hold(tmp_path / "none")
    store.release()


def test_a_user_waits_for_a_removal_and_then_finds_nothing(store: Store, spawn: Spawn) -> None:
    script = USER.replace("assert store.hold", 'print(store.hold(store.artifacts / "sft-1"))  #')
    with locks.exclusive(store.marks, "artifacts/sft-1") as free:
        assert free
        user = spawn(script, store.root)
        time.sleep(1)
        (store.artifacts / "sft-1").rmdir()
    assert user.stdout is not None
    assert user.stdout.readline() == "False\n"


def test_a_fork_that_outlives_its_parent_has_no_locks(store: Store, spawn: Spawn) -> None:
    user = spawn(USER, store.root, "fork")
    assert user.stdout is not None
    orphan = int(user.stdout.readline())
    assert not _is_free(store)
    user.kill()
    user.wait()
    deadline = time.monotonic() + 500
    try:
        while not _is_free(store):  # it may not have started before
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_recreated_store_has_new_marks(store: Store) -> None:
    store.hold(store.artifacts / "sft-1")
    store.marks.unlink()
    assert _is_free(store), "a mark in a removed file has no effect"
    store.hold(store.artifacts / "sft-1")
    assert not _is_free(store)
    store.release()
