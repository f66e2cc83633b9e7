"""What a Ray stage on a cluster puts on the volume of the store, and takes away at its end.

The stage's own process runs on the head, its workers on other pods, which have no disk in common
but this volume. flytekit by itself downloads inputs to the head's own disk.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flytekit.core.context_manager import FlyteContext, FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider

from nemo_rl_core.store import files, locks
from nemo_rl_core.store.store import Store
from tasks.artifacts import Artifact

_ABANDONED_AFTER_SECONDS = 24 * 3600.0


@contextmanager
def downloaded_to_the_store(ctx: FlyteContext) -> Iterator[FlyteContext]:
    """A context in which flytekit downloads into a folder of the store, removed at the end.

    Folders of attempts that were killed are removed by a later attempt: no process holds them, and
    they are older than a day, should the volume not share locks between machines.

    Args:
        ctx: The container's context.
    """
    inputs = Store.default().inputs
    inputs.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(inputs)
    folder = inputs / uuid.uuid4().hex
    lock = folder.with_suffix(".lock")
    with locks.held(lock, "inputs"):
        try:
            given = ctx.file_access
            access = FileAccessProvider(folder, given.raw_output_prefix, given.data_config)
            with FlyteContextManager.with_context(ctx.with_file_access(access)) as shared:
                yield shared
        finally:
            files.discard(folder)
            lock.unlink()


def remove_uploaded(outputs: Any) -> None:
    """Removes the artifacts among a stage's outputs, once the bucket has them.

    What another process uses stays, for `nemo-rl gc`. A stage that is to run again, as
    `--overwrite-cache` asks, then finds no result of before.

    Args:
        outputs: What the stage returned: an artifact, or several in a sequence or a mapping.
    """
    store = Store.default()
    store.release()
    for artifact in _artifacts(outputs):
        folder = Path(artifact.directory.path)
        if folder.parent != store.artifacts:
            continue
        with locks.exclusive(store.marks, f"artifacts/{folder.name}") as is_free:
            if is_free:
                files.discard(folder)


def _artifacts(outputs: Any) -> Iterator[Artifact]:
    if isinstance(outputs, Artifact):
        yield outputs
    elif isinstance(outputs, list | tuple | dict):
        for each in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from _artifacts(each)


def _remove_abandoned(inputs: Path) -> None:
    oldest = time.time() - _ABANDONED_AFTER_SECONDS
    for lock in inputs.glob("*.lock"):
        with locks.held_if_free(lock) as is_free:
            if is_free and lock.stat().st_mtime < oldest:
                files.discard(lock.with_suffix(""))
                lock.unlink()
    files.sweep_discarded(inputs)
