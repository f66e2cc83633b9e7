"""The collection on a cluster's volume, next to a process that works there."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.store.store import Store
from tasks.collect_garbage import collect_garbage

LONG_AGO = time.time() - 8 * 86400
HOLDER = """
import sys
from pathlib import Path
from nemo_rl_core.store import locks
from nemo_rl_core.store.store import Store

store = Store(Path(sys.argv[1]))
with store.work_folder("train_sft", "running"), locks.locked(store.inputs / "b.lock", "inputs"):
    store.hold(store.artifacts / "train_sft-uploading")
    print("locked", flush=True)
    sys.stdin.read()
"""


def aged(path: Path) -> None:
    for each in [*path.rglob("*"), path]:
        os.utime(each, (LONG_AGO, LONG_AGO))


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store of a cluster: no runs and no history, and everything in it is eight days old."""
    store = Store(tmp_path)
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    folders = [
        *(store.work / f"train_sft-{name}" for name in ("failed", "running", "young")),
        *(store.artifacts / f"train_sft-{name}" for name in ("uploading", "left")),
        *(store.inputs / name for name in ("a", "b")),
    ]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * 10_000)
    (store.inputs / "a.lock").touch()
    (store.work / "train_sft-failed.lock").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    for folder in folders:
        if not folder.name.endswith("young"):
            aged(folder)
    aged(store.inputs)
    yield store
    holder.communicate("")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_files_that_a_stage_uses_or_may_resume_are_kept(volume: Store) -> None:
    summary = collect_garbage(keep_days=7.0)
    assert left(volume.work) == ["train_sft-running", "train_sft-young"]
    assert left(volume.artifacts) == ["train_sft-uploading"]
    assert left(volume.inputs) == ["b"]
    assert not (volume.inputs / "a.lock").exists() and (volume.inputs / "b.lock").exists()
    assert summary.startswith("removed 4 folders and files, 0.0 GiB; ")


def test_an_attempt_may_take_longer_than_too_few_days(volume: Store) -> None:
    with pytest.raises(ConfigError, match="shorter than a stage may run") as refused:
        collect_garbage(keep_days=3.0)
    assert "more than the 3 days" in str(refused.value.expected)
    assert left(volume.inputs) == ["a", "b"]


def test_a_local_store_is_refused(volume: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLYTE_INTERNAL_EXECUTION_ID")
    with pytest.raises(ConfigError, match="volume of a cluster"):
        collect_garbage(keep_days=7.0)
    assert left(volume.inputs) == ["a", "b"]
