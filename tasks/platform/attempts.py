"""Transfer of saved work between attempts of a stage on a cluster.

Locally the store keeps the work folder of a killed stage. On a cluster the next attempt may run on
another machine with another disk, so every checkpoint of a stage is sent to the folder of the
object store that Flyte gives the attempt (`--checkpoint-path`), by the machines that wrote it, and
the next attempt begins with what it finds there (`--prev-checkpoint`). The same code resumes a
stage in both cases.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytekit import current_context
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.context_manager import FlyteContextManager

from nemo_rl_core.checkpoints import manager as checkpointing
from nemo_rl_core.checkpoints.object_saves import ObjectSaves, is_to_be_restored
from nemo_rl_core.distributed.machines import on_machines
from nemo_rl_core.produce import StageResult
from tasks.platform.local import on_cluster


def carried_over(work: Callable[[Path], StageResult]) -> Callable[[Path], StageResult]:
    """Wraps the work of a stage to resume from the previous attempt on a cluster."""
    if not on_cluster():
        return work

    def attempt(folder: Path) -> StageResult:
        return run_attempt(folder, work, current_context().checkpoint)

    return attempt


def run_attempt(
    folder: Path, work: Callable[[Path], StageResult], checkpoint: SyncCheckpoint
) -> StageResult:
    """Runs the work in the folder; complete saves are sent to the attempt's place.

    Args:
        folder: The stage's work folder; existing contents, on a shared disk, take precedence.
        work: Fills it.
        checkpoint: The Flyte checkpoint of the attempt.
    """
    saves = _saves(checkpoint)
    # At once: Flyte passes an attempt only the previous one's place, so an attempt that dies before
    # its first save must not lose what it was given.
    was_given = checkpoint.prev_exists() and saves.take_over(checkpoint._checkpoint_src)
    if was_given and is_to_be_restored(folder):
        saves.restore(folder)
    # A thread publishes saves, and calls this.
    with checkpointing.after_each_save(lambda published: saves.save(folder, published)):
        return work(folder)


def _saves(checkpoint: SyncCheckpoint) -> ObjectSaves:
    """flytekit's own methods transfer a file or folder through this process; its place is used."""
    prefix = str(checkpoint._checkpoint_dest)
    access = FlyteContextManager.current_context().file_access
    system: Any = access.get_filesystem_for_path(prefix)
    return ObjectSaves(system, prefix, move=on_machines)
