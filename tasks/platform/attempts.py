"""What an attempt of a stage leaves to the next one, on a cluster.

Locally the store keeps the work folder of a killed stage. On a cluster the next attempt may run on
another machine, with a disk of its own, so every checkpoint that a stage saves is handed to Flyte
(`current_context().checkpoint`), and the next attempt finds it in its work folder: what resumes a
stage is the same code in both places.
"""

import contextvars
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from flytekit import current_context
from flytekit.core.checkpointer import Checkpoint

from nemo_rl_core.checkpoints import manager as checkpointing
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store import files
from tasks.platform.local import on_cluster

_ARCHIVE = "work.tar"
"""One object, since object stores replace one in whole: half an upload is never read."""


def carried_over(work: Callable[[Path], StageResult]) -> Callable[[Path], StageResult]:
    """The work of a stage, begun on a cluster with what the attempt before has saved."""
    if not on_cluster():
        return work

    def attempt(folder: Path) -> StageResult:
        return run_attempt(folder, work, current_context().checkpoint)

    return attempt


def run_attempt(
    folder: Path, work: Callable[[Path], StageResult], checkpoint: Checkpoint
) -> StageResult:
    """Runs the work in the folder; what it saves is handed to Flyte as soon as it is whole.

    Args:
        folder: The stage's work folder; what is in it already, on a disk that attempts share, wins.
        work: Fills it.
        checkpoint: Of the task's attempt.
    """
    if checkpoint.prev_exists() and not any(folder.iterdir()) and _restore(checkpoint, folder):
        # Flyte shows an attempt only what the one before has left: one that dies before its first
        # save must not lose what it was given.
        _hand_over(checkpoint, folder)
    # Saves are published by a thread, which flytekit's context does not follow by itself.
    context = contextvars.copy_context()
    with checkpointing.after_each_save(lambda: context.run(_hand_over, checkpoint, folder)):
        return work(folder)


def _hand_over(checkpoint: Checkpoint, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        archive = Path(aside) / _ARCHIVE
        with tarfile.open(archive, "w") as tar:
            # Checkpoints come first: what a step adds to other files meanwhile is behind them.
            for name in sorted(files.list_files(folder), key=_not_of_a_checkpoint):
                tar.add(folder / name, arcname=name)
        checkpoint.save(archive)


def _not_of_a_checkpoint(name: str) -> bool:
    return not name.startswith("checkpoints/")


def _restore(checkpoint: Checkpoint, folder: Path) -> bool:
    """Whether the attempt before has saved anything; one that died early has not."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        checkpoint.restore(aside)
        archive = Path(aside) / _ARCHIVE
        if not archive.is_file():
            return False
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return True
