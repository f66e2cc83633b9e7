"""`nemo-rl gc`: planned first, shown, and done so that nothing in use goes.

Safe beside runs: whatever goes is first renamed, while a lock says that nobody uses it; a run that
asks for it a moment later finds nothing, and makes it again. Killed half-way, each artifact is
whole or gone, and the next call deletes what only has another name.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl_core.history.database import is_alive
from nemo_rl_core.maintenance.disk import Snapshot
from nemo_rl_core.maintenance.leftovers import delete, find_leftovers, find_work, tidy_work
from nemo_rl_core.maintenance.retention import Kept, RetentionPolicy, choose, shrink, with_ancestors
from nemo_rl_core.maintenance.survey import ArtifactRecord, Survey, survey
from nemo_rl_core.store import locks
from nemo_rl_core.store.files import mark_discarded
from nemo_rl_core.store.store import Store


@dataclass(frozen=True)
class Plan:
    """What goes.

    Attributes:
        runs: Names; oldest first.
        artifacts: Names; each before those that it was made from.
        work: Names of folders that killed runs have left.
        leftovers: Paths that are nobody's.
        num_bytes: What the store takes, in allocated blocks.
        freed_bytes: How much of it comes free.
        problem: Why no run or artifact goes, where the history cannot be read.
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
        """Whether nothing goes."""
        return not (self.runs or self.artifacts or self.work or self.leftovers)


@dataclass(frozen=True)
class Removed:
    """What went.

    Attributes:
        plan: With what really went, and the bytes that came free.
        in_use: Artifacts that stayed because a process has begun to use them.
    """

    plan: Plan
    in_use: tuple[str, ...]


def make_plan(store: Store, policy: RetentionPolicy, *, now: float | None = None) -> Plan:
    """What the policy would remove now; changes nothing."""
    return _plan(store, survey(store), policy, time.time() if now is None else now)


def remove(
    store: Store,
    policy: RetentionPolicy,
    plan: Plan,
    *,
    now: float | None = None,
    on_removed: Callable[[str], None] = lambda _: None,
) -> Removed:
    """Removes what is in the plan and may still go.

    Args:
        store: The store.
        policy: What the plan was made with: the store is looked at again, since a run may have
            begun to use what the plan names.
        plan: What was shown to the user; nothing else goes.
        now: Unix seconds; the clock's where it is None.
        on_removed: Told each path, for a display.
    """
    found = survey(store)
    again = _plan(store, found, policy, time.time() if now is None else now)
    snapshot = Snapshot(store.root)
    snapshot.freed_by(_all_paths(store, again))  # looked at while they have their names
    runs = [name for name in again.runs if name in plan.runs and not is_alive(store, name)]
    renamed = {store.runs / name: mark_discarded(store.runs / name) for name in runs}
    chosen = [name for name in again.artifacts if name in plan.artifacts]
    taken, in_use = _take(store, chosen, found.artifacts)
    work = frozenset(again.work) & frozenset(plan.work)
    leftovers = [path for path in again.leftovers if path in plan.leftovers]
    gone = [*renamed, *(store.artifacts / name for name in taken)]
    freed = snapshot.freed_by([*gone, *(store.work / name for name in work), *leftovers])
    for path in (*renamed.values(), *taken.values(), *tidy_work(store, work), *leftovers):
        if path is not None:
            delete(path)
            on_removed(path.name)
    done = replace(
        plan,
        runs=tuple(runs),
        artifacts=tuple(taken),
        work=tuple(sorted(work)),
        leftovers=tuple(leftovers),
        num_bytes=snapshot.num_bytes,
        freed_bytes=freed,
    )
    return Removed(done, tuple(in_use))


def _take(
    store: Store, names: Iterable[str], artifacts: Mapping[str, ArtifactRecord]
) -> tuple[dict[str, Path | None], list[str]]:
    """Renames artifacts that nobody uses; what one in use was made from stays with it."""
    taken: dict[str, Path | None] = {}
    stays: set[str] = set()
    in_use = []
    for name in names:
        if name in stays:
            continue
        with locks.alone(store.marks, f"artifacts/{name}") as free:
            if free:
                taken[name] = mark_discarded(store.artifacts / name)
            else:
                in_use.append(name)
                stays |= with_ancestors([name], artifacts)
    return taken, in_use


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
    doomed = {name: each for name, each in found.artifacts.items() if name not in kept.artifacts}
    return Plan(
        runs=tuple(run.name for run in found.runs if run.name not in kept.runs),
        artifacts=tuple(_children_first(doomed)),
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
