"""What one attempt of a stage leaves to the next, at the places of flytekit's checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
from flytekit.core.checkpointer import SyncCheckpoint

from nemo_rl_core.checkpoints.manager import CheckpointManager
from nemo_rl_core.produce import StageResult
from tasks.platform.attempts import StageAttempt, current_attempt


class KilledError(Exception):
    """The machine is gone."""


def work_until(last: int, *, dies: bool, seen: list[int]) -> Callable[[Path], StageResult]:
    """Steps 1 to `last`, each saved; it goes on from the newest save in the folder."""

    def work(folder: Path) -> StageResult:
        manager = CheckpointManager(folder / "checkpoints")
        latest = manager.latest()
        seen.append(latest[0] if latest else 0)
        for step in range(seen[-1] + 1, last + 1):
            with (folder / "metrics.jsonl").open("a") as metrics:
                metrics.write(f"{step}\n")
            manager.save(step, lambda path, step=step: (path / "x").write_text(f"{step}"))
        if dies:
            raise KilledError
        return StageResult("checkpoint", "test", step=last)

    return work


def on_new_disk(tmp_path: Path, number: int) -> Path:
    folder = tmp_path / f"disk-{number}" / "work"
    folder.mkdir(parents=True)
    return folder


def checkpoint(tmp_path: Path, number: int) -> SyncCheckpoint:
    """As Flyte gives it to an attempt: where to save, and where the attempt before has saved."""
    (tmp_path / f"remote-{number}").mkdir()
    before = str(tmp_path / f"remote-{number - 1}") if number else None
    return SyncCheckpoint(str(tmp_path / f"remote-{number}"), before)


def test_an_attempt_goes_on_where_the_last_has_saved(tmp_path: Path) -> None:
    seen: list[int] = []
    with pytest.raises(KilledError):
        work = work_until(3, dies=True, seen=seen)
        StageAttempt(checkpoint(tmp_path, 0)).run(on_new_disk(tmp_path, 0), work)
    # The second dies before it saves anything, and hands on what it was given.
    with pytest.raises(KilledError):
        work = work_until(3, dies=True, seen=seen)
        StageAttempt(checkpoint(tmp_path, 1)).run(on_new_disk(tmp_path, 1), work)
    folder = on_new_disk(tmp_path, 2)
    made = StageAttempt(checkpoint(tmp_path, 2)).run(folder, work_until(5, dies=False, seen=seen))
    assert (seen, made.step) == ([0, 3, 3], 5)
    assert (folder / "metrics.jsonl").read_text().split() == ["1", "2", "3", "4", "5"]
    assert [path.name for path in folder.parent.iterdir()] == ["work"], "copies are gone"


def test_what_lies_on_a_shared_disk_wins(tmp_path: Path) -> None:
    seen: list[int] = []
    shared = on_new_disk(tmp_path, 0)
    StageAttempt(checkpoint(tmp_path, 0)).run(shared, work_until(2, dies=False, seen=seen))
    CheckpointManager(shared / "checkpoints").save(7, lambda path: None)
    StageAttempt(checkpoint(tmp_path, 1)).run(shared, work_until(8, dies=False, seen=seen))
    assert seen == [0, 7]


def test_an_attempt_after_one_that_saved_nothing_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "remote-0").mkdir()
    seen: list[int] = []
    work = work_until(1, dies=False, seen=seen)
    StageAttempt(checkpoint(tmp_path, 1)).run(on_new_disk(tmp_path, 1), work)
    assert seen == [0]


def test_a_save_is_no_longer_told_after_the_work(tmp_path: Path) -> None:
    StageAttempt(checkpoint(tmp_path, 0)).run(
        on_new_disk(tmp_path, 0), work_until(1, dies=False, seen=[])
    )
    manifest = tmp_path / "remote-0" / "save.json"
    written = manifest.stat().st_mtime_ns
    CheckpointManager(tmp_path / "other").save(1, lambda path: None)
    assert manifest.stat().st_mtime_ns == written


def test_an_attempt_begins_once(tmp_path: Path) -> None:
    work = work_until(1, dies=False, seen=[])
    StageAttempt(checkpoint(tmp_path, 0)).run(on_new_disk(tmp_path, 0), work)
    second = StageAttempt(checkpoint(tmp_path, 1))
    assert second.begin()
    (tmp_path / "remote-1" / "save.json").unlink()
    assert second.begin()
    assert not (tmp_path / "remote-1" / "save.json").exists()
    assert not StageAttempt(SyncCheckpoint(str(tmp_path / "remote-2"))).begin()


def test_a_local_run_has_no_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLYTE_INTERNAL_EXECUTION_ID", raising=False)
    assert current_attempt() is None
