"""Transfer of saved work between attempts of a stage on a cluster.

Locally the store keeps the work folder of a killed stage. On a cluster the next attempt may run on
another machine, so the machines that write a checkpoint send it to the attempt's folder in the
object store (`--checkpoint-path`); the next attempt begins with its content (`--prev-checkpoint`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.context_manager import FlyteContextManager

from nemo_rl_core.checkpoints import manager as checkpointing
from nemo_rl_core.checkpoints.object_saves import ObjectSaves, is_to_be_restored
from nemo_rl_core.distributed.machines import on_machines
from nemo_rl_core.produce import StageResult


class StageAttempt:
    """An attempt of a stage on a cluster, with its saves in the object store."""

    def __init__(self, checkpoint: SyncCheckpoint) -> None:
        self._checkpoint = checkpoint
        # Only the location is used: flytekit's own methods transfer files through this process.
        prefix = str(checkpoint._checkpoint_dest)
        access = FlyteContextManager.current_context().file_access
        system: Any = access.get_filesystem_for_path(prefix)
        self.saves = ObjectSaves(system, prefix, move=on_machines)
        self._has_previous_save: bool | None = None

    def begin(self) -> bool:
        """Fetches the last save of the previous attempt, once; returns whether there was one.

        Flyte passes only the location of the previous attempt, so an attempt that dies before its
        first save must not lose that save. Call this under the lock of the stage's work: the
        previous attempt may still be running, and remove saves that it no longer needs.
        """
        if self._has_previous_save is None:
            previous = self._checkpoint._checkpoint_src
            self._has_previous_save = bool(previous) and self.saves.take_over(str(previous))
        return self._has_previous_save

    def run(self, folder: Path, work: Callable[[Path], StageResult]) -> StageResult:
        """Runs the work in the folder; complete saves are sent to the attempt's location.

        Existing contents of the folder, on a shared disk, take precedence.
        """
        if self.begin() and is_to_be_restored(folder):
            self.saves.restore(folder)
        # Called by a thread that publishes saves.
        with checkpointing.after_each_save(lambda saved: self.saves.save(folder, saved)):
            return work(folder)
