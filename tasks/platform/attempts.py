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


class StageAttempt:
    """An attempt of a stage on a cluster.

    Args:
        checkpoint: The Flyte checkpoint of the attempt.

    Attributes:
        saves: Its saves in the object store.
    """

    def __init__(self, checkpoint: SyncCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.saves = _saves(checkpoint)
        self._was_given: bool | None = None

    def begin(self) -> bool:
        """Takes over the last save of the previous attempt, once.

        Flyte passes an attempt only the previous one's place, so an attempt that dies before its
        first save must not lose what it was given. Call it under the lock of the stage's work: the
        previous attempt may still be alive, and remove what it no longer needs.

        Returns:
            Whether there was one.
        """
        if self._was_given is None:
            previous = self._checkpoint._checkpoint_src
            self._was_given = bool(previous) and self.saves.take_over(str(previous))
        return self._was_given

    def run(self, folder: Path, work: Callable[[Path], StageResult]) -> StageResult:
        """Runs the work in the folder; complete saves are sent to the attempt's place.

        Args:
            folder: The stage's work folder; existing contents, on a shared disk, take precedence.
            work: Fills it.
        """
        if self.begin() and is_to_be_restored(folder):
            self.saves.restore(folder)
        # A thread publishes saves, and calls this.
        with checkpointing.after_each_save(lambda saved: self.saves.save(folder, saved)):
            return work(folder)


def current_attempt() -> StageAttempt | None:
    """That of this container; None in a local run."""
    return StageAttempt(current_context().checkpoint) if on_cluster() else None


def _saves(checkpoint: SyncCheckpoint) -> ObjectSaves:
    """flytekit's own methods transfer a file or folder through this process; its place is used."""
    prefix = str(checkpoint._checkpoint_dest)
    access = FlyteContextManager.current_context().file_access
    system: Any = access.get_filesystem_for_path(prefix)
    return ObjectSaves(system, prefix, move=on_machines)
