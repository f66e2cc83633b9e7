"""Files of a Ray stage on the volume of the store on a cluster, and their removal at its end.

The stage's own process runs on the head and its workers on other pods. This volume is their only
common disk. By default flytekit downloads inputs to the head's own disk.
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
    """Yields a context in which flytekit downloads into a folder of the store, removed at the end.

    A later attempt removes the folders of killed attempts: those that no process has locked, and
    that are older than a day, in case the volume does not share locks between machines.
    """
    inputs = Store.default().inputs
    inputs.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(inputs)
    folder = inputs / uuid.uuid4().hex
    lock = folder.with_suffix(".lock")
    with locks.locked(lock, "inputs"):
        try:
            container_access = ctx.file_access
            access = FileAccessProvider(
                folder, container_access.raw_output_prefix, container_access.data_config
            )
            with FlyteContextManager.with_context(ctx.with_file_access(access)) as shared:
                yield shared
        finally:
            files.discard(folder)
            lock.unlink()


def remove_uploaded(outputs: Any) -> None:
    """Removes the artifacts among a stage's outputs, once the bucket has them.

    Artifacts that another process uses stay, for `nemo-rl gc`. A stage that is to run again, as
    with `--overwrite-cache`, then does not find an earlier result.
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
    cutoff = time.time() - _ABANDONED_AFTER_SECONDS
    for lock in inputs.glob("*.lock"):
        with locks.locked_if_free(lock) as is_free:
            if is_free and lock.stat().st_mtime < cutoff:
                files.discard(lock.with_suffix(""))
                lock.unlink()
    files.sweep_discarded(inputs)
