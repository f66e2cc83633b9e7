"""`nemo-rl gc`: garbage collection in a store, with a plan first; nothing in use is removed.

Safe beside running jobs: an artifact is first renamed under a lock that no process may share; a run
that looks for it later finds nothing, and makes it again. If the collection is killed, each
artifact is complete or gone, and the next call deletes the renamed ones.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl_core.history.liveness import is_alive
from nemo_rl_core.maintenance.disk import Snapshot
from nemo_rl_core.maintenance.leftovers import delete, find_leftovers, find_work, tidy_work
from nemo_rl_core.maintenance.retention import Kept, RetentionPolicy, choose, shrink, with_ancestors
from nemo_rl_core.maintenance.survey import ArtifactRecord, Survey, survey
from nemo_rl_core.store import locks
from nemo_rl_core.store.files import mark_discarded
from nemo_rl_core.store.store import Store


@dataclass(frozen=True)
class Plan:
    """Files to remove.

    Attributes:
        runs: Names, oldest first.
        artifacts: Names, children before their parents.
        work: Names of work folders of killed runs.
        leftovers: Paths of unused files and folders.
        num_bytes: Size of the store, in allocated blocks.
        freed_bytes: Bytes that are freed.
        problem: Error if the history cannot be read; then no run or artifact is removed.
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
    """Result of a collection.

    Attributes:
        plan: The plan with what was really removed, and the freed bytes.
        in_use: Artifacts that stayed because a process has begun to use them.
    """

    plan: Plan
    in_use: tuple[str, ...]


def make_plan(store: Store, policy: RetentionPolicy, *, now: float | None = None) -> Plan:
    """Plans what the policy removes now; changes nothing."""
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

    Args:
        store: The store.
        policy: The policy of the plan. The store is surveyed again, since a run may have begun to
            use something in the plan.
        plan: The plan that was shown to the user; nothing else is removed.
        now: Unix seconds; None for the current time.
        on_removed: Called with the name of each removed path, for a display.
    """
    found = survey(store)
    again = _plan(store, found, policy, time.time() if now is None else now)
    snapshot = Snapshot(store.root)
    snapshot.freed_by(_all_paths(store, again))  # read before they are renamed
    runs = [name for name in again.runs if name in plan.runs and not is_alive(store, name)]
    renamed = {store.runs / name: mark_discarded(store.runs / name) for name in runs}
    chosen = [name for name in again.artifacts if name in plan.artifacts]
    renamed_artifacts, in_use = _rename_unused(store, chosen, found.artifacts)
    work = frozenset(again.work) & frozenset(plan.work)
    leftovers = [path for path in again.leftovers if path in plan.leftovers]
    gone = [*renamed, *(store.artifacts / name for name in renamed_artifacts)]
    freed = snapshot.freed_by([*gone, *(store.work / name for name in work), *leftovers])
    for path in (
        *renamed.values(),
        *renamed_artifacts.values(),
        *tidy_work(store, work),
        *leftovers,
    ):
        if path is not None:
            delete(path)
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
    """Renames unused artifacts; the ancestors of one in use stay too."""
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


def _plan(store: Store, found: Survey, policy: RetentionPolicy, now: float) -> Plan:
    snapshot = Snapshot(store.root)
    age = policy.work_older_than_seconds
    work = tuple(find_work(store, older_than_seconds=age, now=now))
    leftovers = tuple(find_leftovers(store, older_than_seconds=age, now=now))
    others = [*(store.work / name for name in work), *leftovers]

    def size_with(kept: Kept) -> int:
        return snapshot.num_bytes - snapshot.freed_by([*others, *_paths(store, found, kept)])

    kept = choose(found, policy, now=now)
    size = size_with(kept)
    if policy.max_bytes is not None:
        kept, size = shrink(found, kept, max_bytes=policy.max_bytes, size_with=size_with)
    removable = {name: each for name, each in found.artifacts.items() if name not in kept.artifacts}
    return Plan(
        runs=tuple(run.name for run in found.runs if run.name not in kept.runs),
        artifacts=tuple(_children_first(removable)),
        work=work,
        leftovers=leftovers,
        num_bytes=snapshot.num_bytes,
        freed_bytes=snapshot.num_bytes - size,
        problem=found.problem,
    )


def _all_paths(store: Store, plan: Plan) -> list[Path]:
    return [
        *(store.runs / name for name in plan.runs),
        *(store.artifacts / name for name in plan.artifacts),
        *(store.work / name for name in plan.work),
        *plan.leftovers,
    ]


def _paths(store: Store, found: Survey, kept: Kept) -> list[Path]:
    runs = [store.runs / run.name for run in found.runs if run.name not in kept.runs]
    return runs + [store.artifacts / name for name in found.artifacts if name not in kept.artifacts]


def _children_first(artifacts: Mapping[str, ArtifactRecord]) -> list[str]:
    parents_first: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in artifacts and name not in parents_first:
            for parent in sorted(artifacts[name].parents):
                visit(parent)
            parents_first[name] = None

    for name in sorted(artifacts):
        visit(name)
    return list(reversed(parents_first))
