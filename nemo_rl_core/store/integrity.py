"""Whether an artifact is what its manifest describes: content, weights, config.

A stage's parents, and what is taken instead of running a stage, are hashed before they are used:
each file once, and again when it has changed. `nemo-rl verify` reads all of them every time: a disk
can damage a file without touching its times.
"""

import errno
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.files import hash_file, hash_folder
from nemo_rl_core.store.manifest import ANCESTORS, MANIFEST, Manifest, config_hash
from nemo_rl_core.store.remembered import RememberedHashes
from nemo_rl_core.store.store import Store

logger = logging.getLogger(__name__)

CARD = "README.md"
"""A model's card, in its folder: it tells commit and machine, and no model depends on it."""

VOLATILE = (
    MANIFEST,
    ANCESTORS,
    "metrics.jsonl",
    "finished.json",
    "deck.html",
    "summary.txt",
    f"model/{CARD}",
)
"""Files of an artifact that tell times, costs or who made it; its content hash leaves them out."""

HashOfFile = Callable[[Path], str]

_LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EIO)
"""What the system says of a file that is gone, is no file any more, or that the disk lost."""


def hash_content(folder: Path, hash_of: HashOfFile = hash_file) -> str:
    """What an artifact's manifest calls its content hash."""
    return hash_folder(folder, exclude=VOLATILE, hash_of=hash_of)


def hash_weights(folder: Path, hash_of: HashOfFile = hash_file) -> str | None:
    """What an artifact's manifest calls its weights' hash; None where it holds no model."""
    model = folder / "model"
    return hash_folder(model, exclude=(CARD,), hash_of=hash_of) if model.is_dir() else None


def damage(folder: Path, hash_of: HashOfFile = hash_file) -> str:
    """What is wrong with an artifact's folder, in one line; empty where nothing is.

    Args:
        folder: The artifact, in a store or a copy of it elsewhere.
        hash_of: The sha256 of a file's content.

    Raises:
        OSError: If the folder cannot be read now, which says nothing about it, such as for too
            many open files; likewise `StoreError`.
    """
    try:
        manifest = Manifest.read(folder)
        # Weights are a part of the content: no file is read twice.
        return "; ".join(_differences(folder, manifest, functools.cache(hash_of)))
    except (OSError, StoreError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno not in _LOST:
            raise
        return error.in_one_line if isinstance(error, StoreError) else f"cannot be read: {error}"


def _differences(folder: Path, manifest: Manifest, hash_of: HashOfFile) -> Iterator[str]:
    if manifest.config or manifest.config_hash:
        config = config_hash(manifest.config)
        if config != manifest.config_hash:
            yield _differs("settings", manifest.config_hash, config)
    content = hash_content(folder, hash_of)
    if content != manifest.content_hash:
        yield _differs("content", manifest.content_hash, content)
    if manifest.weights_hash is not None:
        weights = hash_weights(folder, hash_of) or "no model/"
        if weights != manifest.weights_hash:
            yield _differs("weights", manifest.weights_hash, weights)


def _differs(what: str, recorded: str, found: str) -> str:
    return f"the hash of its {what} was {recorded[:12]} and is {found[:12]}"


def damage_since(store: Store, folder: Path) -> str:
    """As `damage`, but files that have not changed since they were hashed are not read again.

    Args:
        store: Its cache remembers what was hashed.
        folder: An artifact. One that lies outside the store, such as a download, is read in whole.
    """
    if folder.parent != store.artifacts:
        return damage(folder)
    known = RememberedHashes(folder, store.verified / f"{folder.name}.json")
    if damage(folder, known):
        # The memory may be what is damaged, and condemns nothing by itself.
        return damage(folder)
    known.save()
    return ""


def set_aside_damaged(store: Store, folder: Path) -> bool:
    """Moves an artifact out of the way if it is there and damaged; call it inside `work_folder`.

    The stage's lock keeps a second process from moving what the first has made again meanwhile. A
    process that reads the damaged artifact keeps the files that it has open, and opens no more.

    Returns:
        Whether that was so; a warning says what is wrong, and where the folder lies now.

    Raises:
        StoreError: If the disk refuses.
    """
    problem = damage_since(store, folder) if folder.is_dir() else ""
    if not problem:
        return False
    aside = store.set_aside(folder)
    logger.warning("%s is damaged and is made again: %s; moved to %s", folder.name, problem, aside)
    return True


def refuse_damaged(store: Store, folder: Path) -> None:
    """Checks an artifact that a stage is about to read.

    Raises:
        StoreError: If it is damaged.
    """
    problem = damage_since(store, folder)
    if problem:
        raise StoreError(
            f"the artifact in {folder} is damaged",
            expected="what its stage made",
            got=problem,
            fix="give the same command again, which makes it again; on a cluster with "
            "--overwrite-cache",
        )
