"""`nemo-rl gc`: planned garbage collection in a store; nothing in use is removed.

It is safe during runs: each artifact is first renamed under an exclusive lock, so it is either
complete or gone; the next call deletes what a killed one has renamed.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path

from nemo_rl_core.history.liveness import is_alive
from nemo_rl_core.maintenance.disk import Snapshot, newest_change
from nemo_rl_core.maintenance.retention import Kept, RetentionPolicy, choose, shrink, with_ancestors
from nemo_rl_core.maintenance.survey import ArtifactRecord, Survey, survey
from nemo_rl_core.store import locks
from nemo_rl_core.store.files import ASIDE, DISCARDED, mark_discarded
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store

_MAX_WRITE_SECONDS = 3600.0
"""Maximum time to write a file before it gets its final name."""


@dataclass(frozen=True)
class Plan:
    """Files to remove; artifacts come before their parents.

    With a `problem`, an error of the history, no run or artifact is removed.
    """

    runs: tuple[str, ...]
    artifacts: tuple[str, ...]
    work: tuple[str, ...]
    leftovers: tuple[Path, ...]
    num_bytes: int
    freed_bytes: int
    problem: str = ""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to remove."""
        return not (self.runs or self.artifacts or self.work or self.leftovers)


@dataclass(frozen=True)
class Removed:
    """Files that were removed, and artifacts that a process has started to use meanwhile."""

    plan: Plan
    in_use: tuple[str, ...]


def make_plan(store: Store, policy: RetentionPolicy, *, now: float | None = None) -> Plan:
    """Plans the removals under the policy without changing anything."""
    return _plan(store, survey(store), policy, time.time() if now is None else now)


def remove(
    store: Store,
    policy: RetentionPolicy,
    plan: Plan,
    *,
    now: float | None = None,
    on_removed: Callable[[str], None] = lambda _: None,
) -> Removed:
    """Removes everything in the plan that the policy still allows.

    The store is surveyed again, since a run may have started to use something in the plan.
    """
    surveyed = survey(store)
    current = _plan(store, surveyed, policy, time.time() if now is None else now)
    snapshot = Snapshot(store.root)
    snapshot.freed_by(_all_paths(store, current))  # read before they are renamed
    runs = [name for name in current.runs if name in plan.runs and not is_alive(store, name)]
    renamed = {store.runs / name: mark_discarded(store.runs / name) for name in runs}
    chosen = [name for name in current.artifacts if name in plan.artifacts]
    renamed_artifacts, in_use = _rename_unused(store, chosen, surveyed.artifacts)
    work = frozenset(current.work) & frozenset(plan.work)
    leftovers = [path for path in current.leftovers if path in plan.leftovers]
    renamed_paths = [*renamed, *(store.artifacts / name for name in renamed_artifacts)]
    freed = snapshot.freed_by([*renamed_paths, *(store.work / name for name in work), *leftovers])
    for path in (
        *renamed.values(),
        *renamed_artifacts.values(),
        *_tidy_work(store, work),
        *leftovers,
    ):
        if path is not None:
            _delete(path)
            on_removed(path.name)
    done = replace(
        plan,
        runs=tuple(runs),
        artifacts=tuple(renamed_artifacts),
        work=tuple(sorted(work)),
        leftovers=tuple(leftovers),
        num_bytes=snapshot.num_bytes,
        freed_bytes=freed,
    )
    return Removed(done, tuple(in_use))


def _rename_unused(
    store: Store, names: Iterable[str], artifacts: Mapping[str, ArtifactRecord]
) -> tuple[dict[str, Path | None], list[str]]:
    renamed_artifacts: dict[str, Path | None] = {}
    kept_names: set[str] = set()
    in_use = []
    for name in names:
        if name in kept_names:
            continue
        with locks.exclusive(store.marks, f"artifacts/{name}") as free:
            if free:
                renamed_artifacts[name] = mark_discarded(store.artifacts / name)
            else:
                in_use.append(name)
                kept_names |= with_ancestors([name], artifacts)
    return renamed_artifacts, in_use


def _plan(store: Store, surveyed: Survey, policy: RetentionPolicy, now: float) -> Plan:
    snapshot = Snapshot(store.root)
    age = policy.work_older_than_seconds
    work = tuple(_find_work(store, older_than_seconds=age, now=now))
    leftovers = tuple(find_leftovers(store, older_than_seconds=age, now=now))
    others = [*(store.work / name for name in work), *leftovers]

    def size_with(kept: Kept) -> int:
        return snapshot.num_bytes - snapshot.freed_by([*others, *_paths(store, surveyed, kept)])

    kept = choose(surveyed, policy, now=now)
    size = size_with(kept)
    if policy.max_bytes is not None:
        kept, size = shrink(surveyed, kept, max_bytes=policy.max_bytes, size_with=size_with)
    removable = {
        name: each for name, each in surveyed.artifacts.items() if name not in kept.artifacts
    }
    return Plan(
        runs=tuple(run.name for run in surveyed.runs if run.name not in kept.runs),
        artifacts=tuple(_children_first(removable)),
        work=work,
        leftovers=leftovers,
        num_bytes=snapshot.num_bytes,
        freed_bytes=snapshot.num_bytes - size,
        problem=surveyed.problem,
    )


def _all_paths(store: Store, plan: Plan) -> list[Path]:
    return [
        *(store.runs / name for name in plan.runs),
        *(store.artifacts / name for name in plan.artifacts),
        *(store.work / name for name in plan.work),
        *plan.leftovers,
    ]


def _paths(store: Store, surveyed: Survey, kept: Kept) -> list[Path]:
    runs = [store.runs / run.name for run in surveyed.runs if run.name not in kept.runs]
    return runs + [
        store.artifacts / name for name in surveyed.artifacts if name not in kept.artifacts
    ]


def _children_first(artifacts: Mapping[str, ArtifactRecord]) -> list[str]:
    parents = {name: sorted(artifacts[name].parents & artifacts.keys()) for name in artifacts}
    return [*TopologicalSorter(parents).static_order()][::-1]


def _find_work(store: Store, *, older_than_seconds: float, now: float) -> Iterator[str]:
    """Yields work folders of killed runs that have not changed for `older_than_seconds`."""
    for folder in sorted(store.work.glob("*")):
        if not folder.is_dir() or folder.name[0] == "." or _is_locked(folder):
            continue
        # A duplicate of a published artifact is useless at any age.
        artifact_name = _artifact_of(store, folder)
        is_duplicate = artifact_name is not None and store.is_current(
            store.artifacts / artifact_name
        )
        if is_duplicate or now - newest_change(folder) > older_than_seconds:
            yield folder.name


def find_leftovers(store: Store, *, older_than_seconds: float, now: float) -> Iterator[Path]:
    """Yields interrupted writes, old damaged artifacts, downloads and records of GPU-hours."""
    folders = (store.root, store.artifacts, store.runs, store.work, store.models, store.cache)
    for parent in (*folders, store.verified, store.cache / "packages"):
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
        if now - newest_change(lock) > older_than_seconds and not _is_locked(folder):
            yield from (path for path in (folder, lock) if path.exists())
    for path in sorted([*store.verified.glob("[!.]*.json"), *store.reads.glob("[!.]*.json")]):
        if not any((parent / path.stem).is_dir() for parent in (store.artifacts, store.work)):
            yield path


def _tidy_work(store: Store, names: frozenset[str]) -> list[Path]:
    """Removes stale records and locks; renames unlocked work folders, for the caller to delete."""
    renamed = []
    for name in sorted(_work_names(store)):
        folder = store.work / name
        with locks.locked_if_free(_with_suffix(folder, ".lock")) as free:
            if not free:
                continue
            if name in names:
                renamed.append(mark_discarded(folder))
            if _artifact_of(store, folder) is None:
                _with_suffix(folder, ".done").unlink(missing_ok=True)
            if not folder.exists() and not _with_suffix(folder, ".done").exists():
                # A process that waits for the lock notices the removal and creates a new file.
                _with_suffix(folder, ".lock").unlink(missing_ok=True)
    return [path for path in renamed if path is not None]


def _artifact_of(store: Store, folder: Path) -> str | None:
    """Returns the artifact in a work folder's record; None if either is missing."""
    try:
        name = str(json.loads(_with_suffix(folder, ".done").read_text())["artifact"])
        artifact = resolve_below(store.artifacts, name, source="a record of a stage")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if artifact.is_dir() else None


def _delete(path: Path) -> None:
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


def _is_locked(folder: Path) -> bool:
    lock = _with_suffix(folder, ".lock")
    if not lock.exists():
        return False
    with locks.locked_if_free(lock) as free:
        return not free


def _with_suffix(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)
