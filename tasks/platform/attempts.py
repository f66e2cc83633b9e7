"""Transfer of saved work between attempts of a stage on a cluster.

Locally the store keeps the work folder of a killed stage. On a cluster the next attempt may run on
another machine with another disk, so every checkpoint of a stage is uploaded through Flyte
(`current_context().checkpoint`) and restored into the next attempt's work folder. The same code
resumes a stage in both cases.
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
"""One object, since object stores replace objects atomically: partial uploads are never read."""


def carried_over(work: Callable[[Path], StageResult]) -> Callable[[Path], StageResult]:
    """Wraps the work of a stage to resume from the previous attempt on a cluster."""
    if not on_cluster():
        return work

    def attempt(folder: Path) -> StageResult:
        return run_attempt(folder, work, current_context().checkpoint)

    return attempt


def run_attempt(
    folder: Path, work: Callable[[Path], StageResult], checkpoint: Checkpoint
) -> StageResult:
    """Runs the work in the folder; complete saves are uploaded through Flyte.

    Args:
        folder: The stage's work folder; existing contents, on a shared disk, take precedence.
        work: Fills it.
        checkpoint: The Flyte checkpoint of the attempt.
    """
    if checkpoint.prev_exists() and not any(folder.iterdir()) and _restore(checkpoint, folder):
        # Flyte passes an attempt only the previous one's upload, so an attempt that dies before its
        # first save must not lose what it restored.
        _hand_over(checkpoint, folder)
    # A thread publishes saves, and does not inherit flytekit's context.
    context = contextvars.copy_context()
    with checkpointing.after_each_save(lambda _: context.run(_hand_over, checkpoint, folder)):
        return work(folder)


def _hand_over(checkpoint: Checkpoint, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        archive = Path(aside) / _ARCHIVE
        with tarfile.open(archive, "w") as tar:
            # Checkpoints first: later additions to other files belong to later steps.
            for name in sorted(files.list_files(folder), key=_not_of_a_checkpoint):
                tar.add(folder / name, arcname=name)
        checkpoint.save(archive)


def _not_of_a_checkpoint(name: str) -> bool:
    return not name.startswith("checkpoints/")


def _restore(checkpoint: Checkpoint, folder: Path) -> bool:
    """Returns whether the previous attempt saved anything."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        checkpoint.restore(aside)
        archive = Path(aside) / _ARCHIVE
        if not archive.is_file():
            return False
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return True
