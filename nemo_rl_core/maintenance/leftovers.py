"""What no run made to be kept: work of killed runs, records of what is gone, half deletions."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_core.maintenance.disk import newest_change
from nemo_rl_core.store import locks
from nemo_rl_core.store.files import ASIDE, DISCARDED, mark_discarded
from nemo_rl_core.store.store import Store

_HALF_WRITTEN_SECONDS = 3600.0
"""A file that is being written takes its name within this time."""


def find_work(store: Store, *, older_than_seconds: float, now: float) -> Iterator[str]:
    """Work folders that killed runs have left and that nobody has touched for so long."""
    for folder in sorted(store.work.glob("*")):
        if not folder.is_dir() or folder.name[0] == "." or _is_held(folder):
            continue
        # A second copy of what is published is of no use, however young.
        if now - newest_change(folder) > older_than_seconds or artifact_of(store, folder):
            yield folder.name


def find_leftovers(store: Store, *, older_than_seconds: float, now: float) -> Iterator[Path]:
    """Files and folders that are nobody's: deletions that were killed, and what was set aside."""
    folders = (store.root, store.artifacts, store.runs, store.work, store.models, store.cache)
    for parent in (*folders, store.verified):
        yield from sorted(parent.glob(f".*{DISCARDED}"))
        for path in sorted(parent.glob(f".*{ASIDE}")):
            if now - newest_change(path) > _HALF_WRITTEN_SECONDS:
                yield path
    # flytekit's own scratch folders, one a process; its caches lie elsewhere.
    scratch = store.cache / "sandbox" / "local_flytekit"
    for parent in (store.damaged, scratch):
        for path in sorted(parent.glob("*")):
            if now - newest_change(path) > older_than_seconds:
                yield path
    for path in sorted(store.verified.glob("[!.]*.json")):
        if not (store.artifacts / path.stem).is_dir():
            yield path


def tidy_work(store: Store, doomed: frozenset[str]) -> list[Path]:
    """Takes the doomed work folders away, and records and locks that stand for nothing.

    Args:
        store: The store.
        doomed: Names of work folders; one that is held again meanwhile stays.

    Returns:
        Renamed folders, for the caller to delete: that may take long, and no lock is held for it.
    """
    renamed = []
    for name in sorted(_work_names(store)):
        folder = store.work / name
        with locks.held_if_free(_beside(folder, ".lock")) as free:
            if not free:
                continue
            if name in doomed:
                renamed.append(mark_discarded(folder))
            if artifact_of(store, folder) is None:
                _beside(folder, ".done").unlink(missing_ok=True)
            if not folder.exists() and not _beside(folder, ".done").exists():
                # Whoever waits for it sees that the file is gone, and makes a new one.
                _beside(folder, ".lock").unlink(missing_ok=True)
    return [path for path in renamed if path is not None]


def artifact_of(store: Store, folder: Path) -> str | None:
    """The artifact that a work folder's record names; None where it, or the artifact, is gone."""
    try:
        name = str(json.loads(_beside(folder, ".done").read_text())["artifact"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if (store.artifacts / name).is_dir() else None


def delete(path: Path) -> None:
    """Removes a file or folder; what is gone already, or cannot be removed now, is passed over."""
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
