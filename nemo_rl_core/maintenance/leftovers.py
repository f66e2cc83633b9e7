"""Leftovers in a store: work of killed runs, stale records, interrupted deletions."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_core.maintenance.disk import newest_change
from nemo_rl_core.store import locks
from nemo_rl_core.store.files import ASIDE, DISCARDED, mark_discarded
from nemo_rl_core.store.store import Store

_MAX_WRITE_SECONDS = 3600.0
"""A file that is being written gets its final name within this time."""


def find_work(store: Store, *, older_than_seconds: float, now: float) -> Iterator[str]:
    """Yields work folders of killed runs without changes for this time."""
    for folder in sorted(store.work.glob("*")):
        if not folder.is_dir() or folder.name[0] == "." or _is_held(folder):
            continue
        # A duplicate of a published artifact is useless at any age.
        made = artifact_of(store, folder)
        is_duplicate = made is not None and store.is_current(store.artifacts / made)
        if is_duplicate or now - newest_change(folder) > older_than_seconds:
            yield folder.name


def find_leftovers(store: Store, *, older_than_seconds: float, now: float) -> Iterator[Path]:
    """Yields unused files and folders.

    They are interrupted writes and deletions, old damaged artifacts, what killed stages on a
    cluster have downloaded, and what its executions have noted of their GPU-hours.
    """
    folders = (store.root, store.artifacts, store.runs, store.work, store.models, store.cache)
    for parent in (*folders, store.verified):
        yield from sorted(parent.glob(f".*{DISCARDED}"))
        for path in sorted(parent.glob(f".*{ASIDE}")):
            if now - newest_change(path) > _MAX_WRITE_SECONDS:
                yield path
    # flytekit's scratch folders, one per process; its caches are elsewhere.
    scratch = store.cache / "sandbox" / "local_flytekit"
    for parent in (store.damaged, scratch, store.gpu_seconds):
        for path in sorted(parent.glob("*")):
            if now - newest_change(path) > older_than_seconds:
                yield path
    for lock in sorted(store.inputs.glob("*.lock")):
        folder = lock.with_suffix("")
        if now - newest_change(lock) > older_than_seconds and not _is_held(folder):
            yield from (path for path in (folder, lock) if path.exists())
    for path in sorted([*store.verified.glob("[!.]*.json"), *store.reads.glob("[!.]*.json")]):
        if not any((parent / path.stem).is_dir() for parent in (store.artifacts, store.work)):
            yield path


def tidy_work(store: Store, names: frozenset[str]) -> list[Path]:
    """Removes work folders, and stale records and locks.

    Args:
        store: The store.
        names: Names of work folders; one that is locked again meanwhile stays.

    Returns:
        Renamed folders, for the caller to delete: deletion may take long, so no lock is held.
    """
    renamed = []
    for name in sorted(_work_names(store)):
        folder = store.work / name
        with locks.held_if_free(_beside(folder, ".lock")) as free:
            if not free:
                continue
            if name in names:
                renamed.append(mark_discarded(folder))
            if artifact_of(store, folder) is None:
                _beside(folder, ".done").unlink(missing_ok=True)
            if not folder.exists() and not _beside(folder, ".done").exists():
                # A process that waits for the lock notices the removal, and creates a new file.
                _beside(folder, ".lock").unlink(missing_ok=True)
    return [path for path in renamed if path is not None]


def artifact_of(store: Store, folder: Path) -> str | None:
    """The artifact in a work folder's record; None if the record or the artifact is missing."""
    try:
        name = str(json.loads(_beside(folder, ".done").read_text())["artifact"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if (store.artifacts / name).is_dir() else None


def delete(path: Path) -> None:
    """Removes a file or folder; ignores missing paths and folders that cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _work_names(store: Store) -> set[str]:
    names = set()
    for path in store.work.glob("*"):
        if path.name[0] != ".":
            names.add(path.stem if path.suffix in (".done", ".lock") else path.name)
    return names


def _is_held(folder: Path) -> bool:
    lock = _beside(folder, ".lock")
    if not lock.exists():
        return False
    with locks.held_if_free(lock) as free:
        return not free


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)
