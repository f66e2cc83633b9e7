"""Upload of an artifact at the end of a stage on a cluster, by its machines and the object store.

flytekit would send the folder through the stage's own process, while its machines wait. Most bytes
of a checkpoint were already sent with the last save: the object store copies them.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flytekit.core.context_manager import FlyteContextManager
from flytekit.types.directory import FlyteDirectory

from nemo_rl_core.checkpoints.object_saves import StoredFile, Transfer, deliver
from nemo_rl_core.distributed.machines import machines_with_workers, on_machines
from nemo_rl_core.store.files import list_files
from nemo_rl_core.store.manifest import DIGESTS, MANIFEST, read_digests
from tasks.stage.attempts import StageAttempt

logger = logging.getLogger(__name__)

_MIN_BYTES = 64 * 2**20
"""Smaller artifacts are sent by flytekit in about a second, the start-up time of other machines."""

_LAST = (DIGESTS, MANIFEST)
"""Uploaded last: a folder without them is not an artifact, so a partial upload is not used."""


def uploaded(artifact: Path, attempt: StageAttempt) -> FlyteDirectory:
    """Returns the artifact in the form of a stage's output; a large one has been uploaded.

    The returned folder of an uploaded artifact has a remote source, so flytekit uploads nothing.
    """
    directory = FlyteDirectory(str(artifact))
    names = list_files(artifact)
    num_bytes = sum((artifact / name).stat().st_size for name in names)
    if num_bytes < _MIN_BYTES:
        return directory
    attempt.begin()  # copies the objects of an earlier attempt that was killed here
    access = FlyteContextManager.current_context().file_access
    address = access.get_random_remote_directory()
    system: Any = access.get_filesystem_for_path(address)
    saved = attempt.saves.copyable_to(system)
    if not machines_with_workers():
        if not saved:
            return directory  # mostly for stages without workers
        logger.warning("no Ray cluster is left: %s is sent by this process only", artifact.name)
    transfers = _transfers(artifact, address, saved)
    on_machines(deliver, system, [transfers[name] for name in names if name not in _LAST])
    on_machines(deliver, system, [transfers[name] for name in _LAST])
    # The same as a folder that flytekit has downloaded: there is nothing to upload.
    directory._remote_source = address
    return directory


def _transfers(
    artifact: Path, address: str, saved: Mapping[str, StoredFile]
) -> dict[str, Transfer]:
    digests = read_digests(artifact)
    transfers = {}
    for name in list_files(artifact):
        path, digest = artifact / name, digests.get(name, "")
        saved_file = saved.get(digest)
        machine, source = (saved_file.machine, saved_file.address) if saved_file else ("", "")
        file = StoredFile(digest, path.stat().st_size, f"{address}/{name}", machine)
        transfers[name] = Transfer(path, file, copied_from=source)
    return transfers
