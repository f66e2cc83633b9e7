"""One attempt of a stage leaves its saves to the next, at flytekit's checkpoint addresses."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.exceptions.user import FlyteRecoverableException

import tasks.prepare_data
from nemo_rl_core.checkpoints.manager import CheckpointManager
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.manifest import Manifest
from tasks.stage import stage
from tasks.stage.attempts import StageAttempt


class KilledError(ConnectionError):
    """The machine is gone."""


def work_until(last: int, *, dies: bool, seen: list[int]) -> Callable[[Path], StageResult]:
    """Makes steps 1 to `last`, each saved; resumes from the newest save in the folder."""

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
    """Checkpoint of an attempt: where to save, and where the previous attempt has saved."""
    (tmp_path / f"remote-{number}").mkdir()
    before = str(tmp_path / f"remote-{number - 1}") if number else None
    return SyncCheckpoint(str(tmp_path / f"remote-{number}"), before)


def test_an_attempt_resumes_from_the_last_save(tmp_path: Path) -> None:
    seen: list[int] = []
    with pytest.raises(KilledError):
        work = work_until(3, dies=True, seen=seen)
        StageAttempt(checkpoint(tmp_path, 0)).run(on_new_disk(tmp_path, 0), work)
    # The second one dies before its first save, and passes on the save of the first.
    with pytest.raises(KilledError):
        work = work_until(3, dies=True, seen=seen)
        StageAttempt(checkpoint(tmp_path, 1)).run(on_new_disk(tmp_path, 1), work)
    folder = on_new_disk(tmp_path, 2)
    made = StageAttempt(checkpoint(tmp_path, 2)).run(folder, work_until(5, dies=False, seen=seen))
    assert (seen, made.step) == ([0, 3, 3], 5)
    assert (folder / "metrics.jsonl").read_text().split() == ["1", "2", "3", "4", "5"]
    assert [path.name for path in folder.parent.iterdir()] == ["work"], "copies are gone"


def test_files_on_a_shared_disk_take_precedence(tmp_path: Path) -> None:
    seen: list[int] = []
    shared = on_new_disk(tmp_path, 0)
    StageAttempt(checkpoint(tmp_path, 0)).run(shared, work_until(2, dies=False, seen=seen))
    CheckpointManager(shared / "checkpoints").save(7, lambda path: None)
    StageAttempt(checkpoint(tmp_path, 1)).run(shared, work_until(8, dies=False, seen=seen))
    assert seen == [0, 7]


def test_an_attempt_without_an_earlier_save_starts_from_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "remote-0").mkdir()
    seen: list[int] = []
    work = work_until(1, dies=False, seen=seen)
    StageAttempt(checkpoint(tmp_path, 1)).run(on_new_disk(tmp_path, 1), work)
    assert seen == [0]


def test_saves_are_not_sent_after_the_work(tmp_path: Path) -> None:
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


def make(work: Callable[[Path], StageResult]) -> dict[str, Any]:
    module = tasks.prepare_data.__name__
    return stage.make(module, "train", config=FrozenConfig(), parents={}, work=work)


def test_a_stage_on_a_cluster_is_retried_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    seen: list[int] = []

    def attempt(number: int, *, dies: bool) -> dict[str, Any]:
        monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / f"store-{number}"))
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", str(number))
        parameters = SimpleNamespace(checkpoint=checkpoint(tmp_path, number))
        monkeypatch.setattr(stage, "current_context", lambda: parameters)
        return make(work_until(3, dies=dies, seen=seen))

    with pytest.raises(FlyteRecoverableException, match="KilledError"):
        attempt(0, dies=True)
    fields = attempt(1, dies=False)
    assert seen == [0, 3]
    run = Manifest.read(Path(fields["directory"].path)).run
    assert run is not None
    assert (run.execution, run.task, run.attempt) == ("f1", "tasks.prepare_data.train", 2)


@pytest.mark.usefixtures("own_store")
def test_a_local_stage_has_no_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLYTE_INTERNAL_EXECUTION_ID", raising=False)
    monkeypatch.setattr(stage, "StageAttempt", None)
    seen: list[int] = []
    with pytest.raises(KilledError):
        make(work_until(3, dies=True, seen=seen))
    fields = make(work_until(3, dies=False, seen=seen))
    assert seen == [0, 3], "the work folder stays"
    assert Manifest.read(Path(fields["directory"].path)).run is None
