"""What one attempt of a stage leaves to the next, at the places of flytekit's checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
from flytekit.core.checkpointer import SyncCheckpoint

from nemo_rl_core.checkpoints.manager import CheckpointManager
from nemo_rl_core.produce import StageResult
from tasks.platform import attempts


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
        attempts.run_attempt(on_new_disk(tmp_path, 0), work, checkpoint(tmp_path, 0))
    # The second dies before it saves anything, and hands on what it was given.
    with pytest.raises(KilledError):
        work = work_until(3, dies=True, seen=seen)
        attempts.run_attempt(on_new_disk(tmp_path, 1), work, checkpoint(tmp_path, 1))
    folder = on_new_disk(tmp_path, 2)
    made = attempts.run_attempt(
        folder, work_until(5, dies=False, seen=seen), checkpoint(tmp_path, 2)
    )
    assert (seen, made.step) == ([0, 3, 3], 5)
    assert (folder / "metrics.jsonl").read_text().split() == ["1", "2", "3", "4", "5"]
    assert [path.name for path in folder.parent.iterdir()] == ["work"], "copies are gone"


def test_what_lies_on_a_shared_disk_wins(tmp_path: Path) -> None:
    seen: list[int] = []
    shared = on_new_disk(tmp_path, 0)
    attempts.run_attempt(shared, work_until(2, dies=False, seen=seen), checkpoint(tmp_path, 0))
    CheckpointManager(shared / "checkpoints").save(7, lambda path: None)
    attempts.run_attempt(shared, work_until(8, dies=False, seen=seen), checkpoint(tmp_path, 1))
    assert seen == [0, 7]


def test_an_attempt_after_one_that_saved_nothing_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "remote-0").mkdir()
    seen: list[int] = []
    work = work_until(1, dies=False, seen=seen)
    attempts.run_attempt(on_new_disk(tmp_path, 1), work, checkpoint(tmp_path, 1))
    assert seen == [0]


def test_a_save_is_no_longer_told_after_the_work(tmp_path: Path) -> None:
    attempts.run_attempt(
        on_new_disk(tmp_path, 0), work_until(1, dies=False, seen=[]), checkpoint(tmp_path, 0)
    )
    manifest = tmp_path / "remote-0" / "save.json"
    written = manifest.stat().st_mtime_ns
    CheckpointManager(tmp_path / "other").save(1, lambda path: None)
    assert manifest.stat().st_mtime_ns == written


def test_locally_the_store_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLYTE_INTERNAL_EXECUTION_ID", raising=False)
    work = work_until(1, dies=False, seen=[])
    assert attempts.carried_over(work) is work
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "x")
    assert attempts.carried_over(work) is not work
