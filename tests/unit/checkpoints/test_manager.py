import json
import logging
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nemo_rl_core.checkpoints.manager import CheckpointManager, recover, save_atomic
from nemo_rl_core.checkpoints.tensors import save_tensors
from nemo_rl_core.config.trainer import KeepBest
from nemo_rl_core.errors import StoreError
from nemo_rl_core.store import files

KilledAt = Callable[[str, int, Path], bool]


def _writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "a").write_text(text)
        (folder / "sub" / "b").write_text(text)

    return write


def _text(folder: Path) -> str:
    texts = {(folder / name).read_text() for name in ("a", "sub/b")}
    assert len(texts) == 1, f"{folder} is a mixture: {texts}"
    return texts.pop()


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_save_atomic_makes_and_replaces(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "model"
    save_atomic(folder, _writer("one"))
    save_atomic(folder, _writer("two"))
    assert _text(folder) == "two"
    assert _visible(folder.parent) == ["model"]


def test_save_atomic_keeps_the_old_when_writing_fails(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "a").write_text("torn")
        raise RuntimeError("boom")

    save_atomic(tmp_path / "model", _writer("one"))
    with pytest.raises(RuntimeError, match="boom"):
        save_atomic(tmp_path / "model", fail)
    assert _text(tmp_path / "model") == "one"
    assert _visible(tmp_path) == ["model"]


def test_a_full_disk_keeps_the_old_checkpoint(small_disk: Path) -> None:
    manager = CheckpointManager(small_disk / "c")
    manager.save(1, _writer("one"))

    def too_large(folder: Path) -> None:
        save_tensors(folder / "w.safetensors", {"w": torch.zeros(2**20)})

    def too_large_as_bytes(folder: Path) -> None:
        (folder / "w").write_bytes(b"x" * 2**22)

    for write in (too_large, too_large_as_bytes):
        with pytest.raises(StoreError, match=r"(?i)no space left"):
            manager.save(2, write)
    saved = manager.latest()
    assert saved is not None
    assert (saved[0], _text(saved[1])) == (1, "one")
    assert _visible(small_disk / "c") == ["step-00000001"]


def test_recover_between_the_two_renames(tmp_path: Path) -> None:
    save_atomic(tmp_path / "model", _writer("one"))
    (tmp_path / "model").rename(tmp_path / ".model.old~")
    (tmp_path / f".model.new{files.ASIDE}").mkdir()
    recover(tmp_path / "model")
    assert _text(tmp_path / "model") == "one"
    assert _visible(tmp_path) == ["model"]


SAVE_OVER = """
def write(folder):
    (folder / "sub").mkdir()
    (folder / "a").write_text("two")
    (folder / "sub" / "b").write_text("two")
manager = CheckpointManager(root)
manager.latest()
manager.save(int(STEP), write)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_one_complete_checkpoint_survives_a_kill_at_any_moment(
    tmp_path: Path, run_killed_at: KilledAt, step: int
) -> None:
    """Replacing the same step (two renames), and adding a step and dropping the one before."""
    seen, moment, killed = set(), 0, True
    script = SAVE_OVER.replace("STEP", str(step))
    while killed:
        moment += 1
        manager = CheckpointManager(tmp_path / str(moment))
        manager.save(1, _writer("one"))
        killed = run_killed_at(script, moment, manager.root)
        saved = manager.latest()
        assert saved is not None
        seen.add((saved[0], _text(saved[1])))
        assert not run_killed_at(script, 0, manager.root)
        assert _visible(manager.root) == [f"step-{step:08d}"]
        assert _text(manager.root / f"step-{step:08d}") == "two"
    assert seen == {(1, "one"), (step, "two")}
    assert moment > 8


@pytest.mark.slow
def test_checkpoints_stay_complete_when_killed_at_random_times(
    tmp_path: Path, spawn: Callable[..., "subprocess.Popen[str]"]
) -> None:
    script = """
import itertools, sys
from pathlib import Path
from nemo_rl_core.checkpoints.manager import CheckpointManager
manager = CheckpointManager(Path(sys.argv[1]), keep_latest=2)
saved = manager.latest()
start = saved[0] if saved else 0
print(start, flush=True)
for step in itertools.count(start + 1):
    def write(folder):
        for index in range(4):
            (folder / f"{index}").write_bytes(str(step).encode() * 50_000)
    manager.save(step, write)
"""
    rng, manager, last = random.Random(1), CheckpointManager(tmp_path, keep_latest=2), 0
    for _ in range(15):
        child = spawn(script, tmp_path)
        assert child.stdout is not None
        assert int(child.stdout.readline()) == last
        time.sleep(rng.uniform(0.02, 0.2))
        child.kill()
        child.communicate()
        saved = manager.latest()
        step = saved[0] if saved else 0
        assert step >= last
        if saved:
            assert (saved[1] / "3").read_bytes() == str(step).encode() * 50_000
        last = step
    assert last > 15


def test_manager_keeps_the_latest(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_latest=2)
    assert manager.latest() is None
    for step in (1, 2, 10):
        path = manager.save(step, _writer(str(step)))
    assert manager.steps() == [2, 10]
    assert manager.latest() == (10, path)


def test_manager_drops_later_steps_of_an_abandoned_run(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_latest=1)
    manager.save(20, _writer("20"))
    manager.save(15, _writer("15"))
    assert manager.steps() == [15]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _copy_manifest(folder: Path) -> None:
    shutil.copy(folder.with_name("step-00000001") / "manifest.json", folder / "manifest.json")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "has changed": lambda folder: _flip(folder / "sub" / "b"),
    "bytes instead of": lambda folder: (folder / "a").write_text("longer"),
    "FileNotFoundError": lambda folder: (folder / "a").unlink(),
    "No such file": lambda folder: (folder / "manifest.json").unlink(),
    "JSONDecodeError": lambda folder: (folder / "manifest.json").write_text('{"step"'),
    "TypeError": lambda folder: (folder / "manifest.json").write_text("[]"),
    "KeyError": lambda folder: (folder / "manifest.json").write_text("{}"),
    "AttributeError": lambda folder: (folder / "manifest.json").write_text(
        json.dumps({"step": 2, "files": 3})
    ),
    "for step 1": _copy_manifest,
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_checkpoint_is_refused_and_the_previous_one_returned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, message: str
) -> None:
    manager = CheckpointManager(tmp_path, keep_latest=2)
    for step in (1, 2):
        manager.save(step, _writer("ab" * step))
    DAMAGES[message](tmp_path / "step-00000002")
    with caplog.at_level(logging.WARNING):
        assert manager.latest() == (1, tmp_path / "step-00000001")
    assert "step-00000002 is refused" in caplog.text
    assert message in caplog.text


def test_without_verify_only_the_size_counts(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, _writer("abc"))
    _flip(path / "a")
    assert manager.latest() is None
    assert manager.latest(verify=False) == (1, path)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_latest"):
        CheckpointManager(tmp_path, keep_latest=0)
    with pytest.raises(ValueError, match=r"manifest\.json is"):
        CheckpointManager(tmp_path).save(1, _touch_manifest)
    assert _visible(tmp_path) == []


def _touch_manifest(folder: Path) -> None:
    (folder / "manifest.json").touch()


def _save(manager: CheckpointManager, step: int, **metrics: float) -> None:
    manager.save(step, _writer(str(step)), metrics=metrics)


def test_the_best_and_the_newest_are_kept(tmp_path: Path) -> None:
    keep = KeepBest(metric="loss", mode="min", count=2)
    manager = CheckpointManager(tmp_path, keep_latest=1, keep_best=keep)
    assert manager.best() is None
    for step, loss in enumerate([0.5, 0.2, 0.9, 0.3, 0.3, float("nan")], start=1):
        _save(manager, step, loss=loss, other=step)
    _save(manager, 7)
    # 0.2, then 0.3 at the newer of two equal steps; one that has no number ranks nowhere.
    assert manager.steps() == [2, 5, 7]
    assert manager.best() == (2, tmp_path / "step-00000002")
    assert manager.latest() == (7, tmp_path / "step-00000007")
    _flip(tmp_path / "step-00000002" / "a")
    assert manager.best() == (5, tmp_path / "step-00000005")


def test_the_highest_is_the_best_where_more_is_better(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_best=KeepBest(metric="accuracy", mode="max"))
    for step, accuracy in ((1, 0.1), (2, 0.4), (3, 0.3)):
        _save(manager, step, accuracy=accuracy)
    assert manager.steps() == [2, 3]


class SlowWriter:
    """A writer that is done after `num_polls` questions, and then writes `text` in one go."""

    def __init__(self, text: str, num_polls: int = 0) -> None:
        self.text, self.polls_left = text, num_polls

    def start_checkpoint(self, path: Path) -> None:
        self.path = path

    def checkpoint_is_written(self) -> bool:
        self.polls_left -= 1
        return self.polls_left < 0

    def finish_checkpoint(self) -> None:
        _writer(self.text)(self.path)


def test_started_checkpoint_is_visible_once_published(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    _save(manager, 1)
    save = manager.start(2, SlowWriter("two"))
    assert (save.step, save.folder) == (2, tmp_path / "step-00000002")
    assert not save.has_ended
    assert manager.latest() == (1, tmp_path / "step-00000001")
    save.wait()
    assert save.has_ended
    assert manager.latest() == (2, tmp_path / "step-00000002")
    assert _text(tmp_path / "step-00000002") == "two"
    assert _visible(tmp_path) == ["step-00000002"]
    save.wait()  # again, which changes nothing


def test_polling_publishes_what_is_written(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save = manager.start(1, SlowWriter("one", num_polls=2))
    assert [save.poll(), save.poll()] == [False, False]
    assert manager.latest() is None
    while not save.poll():  # written, and hashed by a thread
        time.sleep(0.001)
    assert save.has_ended
    assert manager.latest() == (1, tmp_path / "step-00000001")
    assert save.poll()


def test_next_save_waits_for_the_previous_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_latest=2)
    first = manager.start(1, SlowWriter("one", num_polls=99))
    second = manager.start(2, SlowWriter("two"))
    assert (first.has_ended, second.has_ended) == (True, False)
    assert manager.steps() == [1]
    second.wait()
    assert manager.steps() == [1, 2]


METHODS = ["start_checkpoint", "checkpoint_is_written", "finish_checkpoint"]


@pytest.mark.parametrize("method", METHODS)
def test_failed_writer_leaves_no_files(tmp_path: Path, method: str) -> None:
    class Failing(SlowWriter):
        pass

    def fail(self: SlowWriter, *arguments: object) -> None:
        raise RuntimeError(method)

    manager = CheckpointManager(tmp_path)
    _save(manager, 1)
    setattr(Failing, method, fail)
    with pytest.raises(RuntimeError, match=method):
        manager.start(2, Failing("two")).poll()
    assert _visible(tmp_path) == ["step-00000001"]
    _save(manager, 3)
    assert _visible(tmp_path) == ["step-00000003"]


def test_wait_raises_errors_of_publishing(tmp_path: Path) -> None:
    class Meddling(SlowWriter):
        def finish_checkpoint(self) -> None:
            (self.path / "manifest.json").mkdir()

    manager = CheckpointManager(tmp_path)
    _save(manager, 1)
    save = manager.start(2, Meddling("two"))
    with pytest.raises(OSError, match="directory"):
        save.wait()
    assert save.has_ended
    assert manager.latest() == (1, tmp_path / "step-00000001")
    assert _visible(tmp_path) == ["step-00000001"]


@pytest.mark.slow
def test_old_checkpoint_is_complete_after_a_kill_in_a_background_save(
    tmp_path: Path, spawn: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """The trainer's state of two layers, being written by torch's thread when the process dies."""
    script = """
import sys, time
from pathlib import Path
import torch
from nemo_rl_core.backends.training.dtensor.checkpoint import TrainerState
from nemo_rl_core.checkpoints.manager import CheckpointManager
model = torch.nn.Linear(2000, 2000)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2000)).sum().backward()
optimizer.step()
state = TrainerState(optimizer, dict(model.named_parameters()))
class Writer:
    def start_checkpoint(self, folder):
        state.start_saving(folder, num_updates=step)
    def finish_checkpoint(self):
        state.finish_saving()
manager = CheckpointManager(Path(sys.argv[1]))
for step in (1, 2):
    save = manager.start(step, Writer())
    if step == 2:
        print("writing", flush=True)
        time.sleep(600)
    save.wait()
"""
    child = spawn(script, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.kill()
    child.communicate()
    assert list(tmp_path.glob(".step-00000002*"))
    manager = CheckpointManager(tmp_path)
    assert manager.latest() == (1, tmp_path / "step-00000001")
    assert _visible(tmp_path) == ["step-00000001"]
