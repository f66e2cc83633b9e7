"""Upload of an artifact at the end of a stage on a cluster, by its machines and the object store.

flytekit would send the folder through the stage's own process, while its machines wait. Most bytes
of a checkpoint were sent with the last save already: the object store copies them. Machines send
what else is large, as they send saves.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flytekit.core.context_manager import FlyteContextManager
from flytekit.types.directory import FlyteDirectory

from nemo_rl_core.checkpoints.object_saves import StoredFile, Transfer, deliver
from nemo_rl_core.distributed.machines import machines_with_workers, on_machines
from nemo_rl_core.store import partial
from nemo_rl_core.store.files import list_files
from nemo_rl_core.store.manifest import MANIFEST
from tasks.platform.attempts import StageAttempt

logger = logging.getLogger(__name__)

_MIN_BYTES = 64 * 2**20
"""Less is sent by flytekit in about a second, as long as other machines take to begin."""

_LAST = (partial.DIGESTS, MANIFEST)
"""Without them a folder is no artifact: one that was cut off is not taken for whole."""


def uploaded(artifact: Path, attempt: StageAttempt | None) -> FlyteDirectory:
    """An artifact as a stage returns it; a large one is in the object store by then.

    Args:
        artifact: The folder, on a volume that all machines of the stage share.
        attempt: The attempt that made it, or found it on the volume; None in a local run.

    Returns:
        The folder here. Where flytekit has nothing left to upload, it knows its remote source.

    Raises:
        NemoRLError: If the object store fails, or a machine is lost; another attempt may succeed.
    """
    directory = FlyteDirectory(str(artifact))
    names = list_files(artifact)
    num_bytes = sum((artifact / name).stat().st_size for name in names)
    if attempt is None or num_bytes < _MIN_BYTES:
        return directory
    attempt.begin()  # if an earlier attempt was killed at this point, its objects are copied
    access = FlyteContextManager.current_context().file_access
    place = access.get_random_remote_directory()
    system: Any = access.get_filesystem_for_path(place)
    saved = attempt.saves.known_to(system)
    if not machines_with_workers():
        if not saved:
            return directory  # of a stage without workers, mostly
        logger.warning("no Ray cluster is left: %s is sent by this process alone", artifact.name)
    transfers = _transfers(artifact, place, saved)
    on_machines(deliver, system, [transfers[name] for name in names if name not in _LAST])
    on_machines(deliver, system, [transfers[name] for name in _LAST])
    # As flytekit has it of a folder that it has downloaded: there is nothing to upload.
    directory._remote_source = place
    return directory


def _transfers(artifact: Path, place: str, saved: Mapping[str, StoredFile]) -> dict[str, Transfer]:
    """By the names of the files; of content that the last save has, the object is copied."""
    digests = partial.read_digests(artifact)
    transfers = {}
    for name in list_files(artifact):
        path, digest = artifact / name, digests.get(name, "")
        known = saved.get(digest)
        machine, source = (known.machine, known.address) if known else ("", "")
        file = StoredFile(digest, path.stat().st_size, f"{place}/{name}", machine)
        transfers[name] = Transfer(path, file, copied_from=source)
    return transfers
