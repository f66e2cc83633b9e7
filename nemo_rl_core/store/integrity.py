"""Checks content, weights and config of artifacts against their manifests.

Parents and cached artifacts are hashed before use: each file once, and again if it has changed.
`nemo-rl verify` reads every file every time, since a disk can damage a file without changing its
times.
"""

import errno
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.files import hash_file, hash_folder
from nemo_rl_core.store.hash_cache import HashCache
from nemo_rl_core.store.manifest import ANCESTORS, MANIFEST, Manifest, config_hash
from nemo_rl_core.store.store import Store

logger = logging.getLogger(__name__)

CARD = "README.md"
"""A model's card, in its folder. It names commit and machine, so hashes leave it out."""

VOLATILE = (
    MANIFEST,
    ANCESTORS,
    "metrics.jsonl",
    "finished.json",
    "deck.html",
    "summary.txt",
    f"model/{CARD}",
)
"""Files with times, costs or the maker of an artifact; its content hash leaves them out."""

HashOfFile = Callable[[Path], str]

_LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EIO)
"""Errors for a file that is missing, replaced by something else, or lost by the disk."""


def hash_content(folder: Path, hash_of: HashOfFile = hash_file) -> str:
    """Computes the `content_hash` of an artifact's manifest."""
    return hash_folder(folder, exclude=VOLATILE, hash_of=hash_of)


def hash_weights(folder: Path, hash_of: HashOfFile = hash_file) -> str | None:
    """Computes the `weights_hash` of an artifact's manifest; None without a model."""
    model = folder / "model"
    return hash_folder(model, exclude=(CARD,), hash_of=hash_of) if model.is_dir() else None


def damage(folder: Path, hash_of: HashOfFile = hash_file) -> str:
    """Describes the damage of an artifact in one line; empty if it is intact.

    Args:
        folder: The artifact, in a store or elsewhere.
        hash_of: Returns the sha256 of a file's content.

    Raises:
        OSError: If the folder cannot be read for a reason that is no damage, such as too many open
            files; likewise `StoreError`.
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


def _differs(part: str, recorded: str, found: str) -> str:
    return f"the hash of its {part} was {recorded[:12]} and is {found[:12]}"


def damage_of_changed_files(store: Store, folder: Path) -> str:
    """As `damage`, but reads only files that have changed since they were last hashed.

    Args:
        store: The store with the cache of hashes.
        folder: An artifact. One outside of the store, such as a download, is read completely.
    """
    if folder.parent != store.artifacts:
        return damage(folder)
    known = HashCache(folder, store.verified / f"{folder.name}.json")
    if damage(folder, known):
        # The cache itself may be damaged, so the files decide.
        return damage(folder)
    known.save()
    return ""


def set_aside_damaged(store: Store, folder: Path) -> bool:
    """Moves a damaged artifact to `damaged/`; call it inside `work_folder`.

    The stage's lock keeps a second process from moving the artifact that the first has rebuilt. A
    process that reads the damaged artifact keeps its open files, and can open no more.

    Returns:
        True if it was damaged; a warning describes the damage and the new location.

    Raises:
        StoreError: If the disk refuses.
    """
    problem = damage_of_changed_files(store, folder) if folder.is_dir() else ""
    if not problem:
        return False
    aside = store.set_aside(folder)
    logger.warning("%s is damaged and is made again: %s; moved to %s", folder.name, problem, aside)
    return True


def refuse_damaged(store: Store, folder: Path) -> None:
    """Checks an artifact before a stage reads it.

    Raises:
        StoreError: If it is damaged.
    """
    problem = damage_of_changed_files(store, folder)
    if problem:
        raise StoreError(
            f"the artifact in {folder} is damaged",
            expected="the content that its stage made",
            got=problem,
            fix="run the same command again, which rebuilds it; on a cluster with "
            "--overwrite-cache",
        )
