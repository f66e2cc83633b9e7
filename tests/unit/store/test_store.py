import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.database import open_for_writing
from nemo_rl_core.store import files
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.run_log import RunLog

HASH = "0123456789abcdef" * 4
Spawn = Callable[..., "subprocess.Popen[str]"]

STAGE = """
import logging, sys, time
from pathlib import Path
from nemo_rl_core.store.store import Store
logging.basicConfig(format="%(message)s")
store = Store(Path(sys.argv[1]))
with store.work_folder("sft", "key") as folder:
    if store.published("sft", "key"):
        print("cached")
    else:
        (folder / "busy").touch(exist_ok=False)
        print("started", flush=True)
        time.sleep(float(sys.argv[2]))
        (folder / "busy").unlink()
        (folder / "result").write_text("42")
        store.publish(folder, stage="sft", content_hash="0123456789abcdef")
        print("ran")
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def _run(store: Store, key: str, content_hash: str = HASH, text: str = "42") -> Path:
    with store.work_folder("sft", key) as folder:
        (folder / "result").write_text(text)
        return store.publish(folder, stage="sft", content_hash=content_hash)


def test_default_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEMO_RL_HOME", "here")
    assert Store.default().root == tmp_path / "here"
    monkeypatch.setenv("NEMO_RL_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.default().root == tmp_path / ".nemo_rl"


def test_check_writable_makes_every_folder_and_leaves_no_probe(store: Store) -> None:
    store.check_writable(min_free_mib=1)
    assert sorted(path.name for path in store.root.rglob("*")) == [
        "artifacts", "cache", "models", "runs", "work",
    ]  # fmt: skip


def test_check_writable_refuses_a_file_in_the_way(store: Store) -> None:
    store.root.parent.mkdir(exist_ok=True)
    store.root.write_text("")
    with pytest.raises(StoreError, match="a file is in the way"):
        store.check_writable()


def test_check_writable_refuses_a_read_only_disk(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="read-only"):
        Store(small_disk).check_writable()


def test_check_writable_refuses_a_nearly_full_disk(small_disk: Path) -> None:
    with pytest.raises(StoreError, match="nearly full") as caught:
        Store(small_disk).check_writable(min_free_mib=64)
    assert "64 MiB" in str(caught.value)
    (small_disk / "fill").write_bytes(b"x" * 2**20)
    with pytest.raises(StoreError, match="no space left"):
        Store(small_disk).check_writable(min_free_mib=0)


def test_publish_makes_an_artifact_and_a_record(store: Store) -> None:
    assert store.published("sft", "k") is None
    artifact = _run(store, "k")
    assert artifact == store.artifacts / "sft-0123456789abcdef"
    assert (artifact / "result").read_text() == "42"
    assert store.published("sft", "k") == artifact
    assert not (store.work / "sft-k").exists()


def test_publish_drops_a_second_copy_of_the_same_content(store: Store) -> None:
    first = _run(store, "one", text="first")
    assert _run(store, "two", text="second") == first
    assert (first / "result").read_text() == "first"
    assert store.published("sft", "two") == first
    assert sorted(path.name for path in store.work.iterdir()) == [
        "sft-one.done", "sft-one.lock", "sft-two.done", "sft-two.lock",
    ]  # fmt: skip


def test_published_forgets_a_removed_artifact_and_survives_a_moved_store(store: Store) -> None:
    artifact = _run(store, "k")
    moved = Store(store.root.rename(store.root.with_name("moved")))
    assert moved.published("sft", "k") == moved.artifacts / artifact.name
    files.discard(moved.artifacts / artifact.name)
    assert moved.published("sft", "k") is None


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"artifact'])
def test_a_damaged_record_counts_as_none(store: Store, damage: str) -> None:
    _run(store, "k")
    (store.work / "sft-k.done").write_text(damage)
    assert store.published("sft", "k") is None


def test_work_is_kept_after_an_error_and_an_unused_folder_is_removed(store: Store) -> None:
    with pytest.raises(RuntimeError), store.work_folder("sft", "k") as folder:
        (folder / "partial").write_text("1")
        raise RuntimeError
    with store.work_folder("sft", "k") as folder:
        assert (folder / "partial").read_text() == "1"
        (folder / "partial").unlink()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
def test_invalid_file_names_are_refused(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="plain file names"), store.work_folder("sft", name):
        pass


def test_publish_accepts_only_work_folders_of_the_stage(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a work folder"):
        store.publish(tmp_path, stage="sft", content_hash=HASH)
    with store.work_folder("sft", "k") as folder:
        with pytest.raises(ValueError, match="not a work folder"):
            store.publish(folder, stage="grpo", content_hash=HASH)
        with pytest.raises(ValueError, match="16 or more"):
            store.publish(folder, stage="sft", content_hash="abc")


def test_publish_on_a_full_disk_keeps_the_work(small_disk: Path) -> None:
    store = Store(small_disk)
    with store.work_folder("sft", "k") as folder:
        (folder / "result").write_text("42")
        filler = small_disk / "fill"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(b"x" * 2**21)
        with pytest.raises(StoreError, match="no space left"):
            store.publish(folder, stage="sft", content_hash=HASH)
        assert (folder / "result").read_text() == "42"
        filler.unlink()
        assert store.publish(folder, stage="sft", content_hash=HASH).is_dir()


def test_processes_with_one_key_take_turns(store: Store, spawn: Spawn) -> None:
    children = [spawn(STAGE, store.root, 0.5) for _ in range(3)]
    results = [child.communicate(timeout=500) for child in children]
    assert sorted(out.split()[-1] for out, _ in results) == ["cached", "cached", "ran"], results
    waited = [err for out, err in results if out.split() == ["cached"]]
    assert any(
        err.count("waiting for process") == 1 and "runs the same stage" in err for err in waited
    )
    assert len(list(store.artifacts.iterdir())) == 1


def test_a_waiting_process_takes_over_from_a_killed_one(store: Store, spawn: Spawn) -> None:
    holder = spawn(STAGE, store.root, 60)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "started\n"
    takes_over = """
import logging, sys
from pathlib import Path
from nemo_rl_core.store.store import Store
logging.basicConfig(format="%(message)s")
with Store(Path(sys.argv[1])).work_folder("sft", "key") as folder:
    print([path.name for path in folder.iterdir()])
"""
    waiter = spawn(takes_over, store.root)
    assert waiter.stderr is not None
    line = waiter.stderr.readline()
    assert line == f"sft: waiting for process {holder.pid}, which runs the same stage\n"
    assert waiter.poll() is None
    holder.kill()
    out, err = waiter.communicate(timeout=500)
    assert (out, err) == ("['busy']\n", "")


def test_a_forked_child_that_outlives_its_parent_keeps_no_lock(store: Store, spawn: Spawn) -> None:
    forks = """
import os, sys, time
from pathlib import Path
from nemo_rl_core.store.store import Store
with Store(Path(sys.argv[1])).work_folder("sft", "key") as folder:
    (folder / "mine").touch()
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""
    holder = spawn(forks, store.root)
    assert holder.stdout is not None
    orphan = int(holder.stdout.readline())
    waiter = spawn(STAGE.replace("started", "took over"), store.root, 0)
    time.sleep(0.5)
    assert waiter.poll() is None, "the fork must not take the lock from its parent"
    holder.kill()
    try:
        out, _ = waiter.communicate(timeout=500)
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert out.split() == ["took", "over", "ran"]


def test_a_forked_child_may_leave_the_work_folder(store: Store, spawn: Spawn) -> None:
    script = """
import os, sys
from pathlib import Path
from nemo_rl_core.store.store import Store
store = Store(Path(sys.argv[1]))
with store.work_folder("sft", "key") as folder:
    (folder / "mine").touch()
    child = os.fork()
if child == 0:
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert spawn(script, store.root).communicate(timeout=500) == ("0\n", "")


def test_other_keys_do_not_wait(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with store.work_folder("sft", "a"), store.work_folder("sft", "b"):
        pass
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


PUBLISH = """
store = Store(root)
with store.work_folder("sft", "key") as folder:
    if store.published("sft", "key") is None:
        for name in ("a", "b"):
            if not (folder / name).exists():
                files.write_atomic(folder / name, name * 1000)
        store.publish(folder, stage="sft", content_hash=files.hash_folder(folder))
"""


@pytest.mark.slow
@pytest.mark.parametrize("already_there", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_kill_at_any_moment_of_publishing_loses_nothing(
    tmp_path: Path, run_killed_at: Callable[[str, int, Path], bool], already_there: bool
) -> None:
    moment, killed = 0, True
    while killed:
        moment += 1
        store = Store(tmp_path / str(moment))
        if already_there:
            assert not run_killed_at(PUBLISH.replace('"key"', '"other"'), 0, store.root)
        killed = run_killed_at(PUBLISH, moment, store.root)
        artifact = store.published("sft", "key")
        assert artifact or killed
        left = store.work / "sft-key"
        if (store.work / "sft-key.done").exists() and left.exists():
            # Complete until it is moved, since a stage could still resume from it.
            assert {path.name for path in left.iterdir()} == {"a", "b"}
        for folder in store.artifacts.glob("*"):
            assert {path.name for path in folder.iterdir()} == {"a", "b"}
        assert not run_killed_at(PUBLISH, 0, store.root)
        artifact = store.published("sft", "key")
        assert artifact is not None
        assert (artifact / "b").read_text() == "b" * 1000
        assert sorted(path.suffix for path in store.work.glob("*-key*")) == [".done", ".lock"]
        assert not list(store.root.rglob(f".*{files.DISCARDED}"))
    # Two files, the record, the locks and the renames: the loop covered the moments in between.
    assert moment > 8


@pytest.mark.slow
def test_killed_at_random_times_while_others_compete(store: Store, spawn: Spawn) -> None:
    """Three processes publish keys while one of them is repeatedly killed and replaced."""
    script = """
import itertools, json, sys
from pathlib import Path
from nemo_rl_core.store import files
from nemo_rl_core.store.store import Store
store = Store(Path(sys.argv[1]))
for key in map(str, itertools.count()):
    with store.work_folder("sft", key) as folder:
        if store.published("sft", key) is None:
            (folder / "x").write_text(key * 500)
            store.publish(folder, stage="sft", content_hash=files.hash_folder(folder))
"""
    rng = random.Random(0)
    children = [spawn(script, store.root) for _ in range(3)]
    deadline = time.monotonic() + 500
    while not (store.work / "sft-9.done").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    num_kills = 0
    while num_kills < 12 or not (store.work / "sft-20.done").exists():
        assert time.monotonic() < deadline
        time.sleep(rng.uniform(0.05, 0.25))
        children[0].kill()
        children = [*children[1:], spawn(script, store.root)]
        num_kills += 1
    assert all(child.poll() is None for child in children), [c.communicate() for c in children]
    for child in children:
        child.kill()
        child.communicate()
    records = list(store.work.glob("sft-*.done"))
    assert len(records) > 20
    for record in records:
        key = record.name.removeprefix("sft-").removesuffix(".done")
        artifact = store.artifacts / json.loads(record.read_text())["artifact"]
        if artifact.exists():
            assert (artifact / "x").read_text() == key * 500
    num_complete = sum(store.published("sft", record.name[4:-5]) is not None for record in records)
    # Each kill leaves at most one record without an artifact.
    assert num_complete >= len(records) - 3


def first_lock(store: Store) -> None:
    with store.work_folder("sft", "key"):
        pass


def first_log(store: Store) -> None:
    RunLog.start(store).close()


def first_import(store: Store) -> None:
    subprocess.run(
        [sys.executable, "-c", "from tasks.flyte.local import use_store; use_store()"],
        env={**os.environ, "NEMO_RL_HOME": str(store.root)},
        check=True,
    )


FIRST = [Store.check_writable, first_lock, first_log, first_import, open_for_writing]


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST)
def test_a_new_store_is_open_to_its_user_only(tmp_path: Path, first: Callable[..., Any]) -> None:
    store = Store(tmp_path / "parent" / "store")
    first(store)
    assert store.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("first", FIRST)
def test_a_store_shared_by_a_group_stays_shared(tmp_path: Path, first: Callable[..., Any]) -> None:
    store = Store(tmp_path / "store")
    store.root.mkdir()
    store.root.chmod(0o2770)
    first(store)
    assert store.root.stat().st_mode & 0o7777 == 0o2770
