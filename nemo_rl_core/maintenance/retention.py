"""Which runs and artifacts are kept: pure, over what a survey has found.

Kept are runs by number and age, those that are pinned, and those whose process is alive; and every
artifact that a kept run made or used, with all that it was made from, or that a process holds.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from nemo_rl_core.maintenance.survey import ArtifactRecord, RunRecord, Survey


@dataclass(frozen=True)
class RetentionPolicy:
    """What a user is ready to lose. By default, only what belongs to no run any more.

    Attributes:
        keep_runs: The newest so many runs are kept; None keeps all.
        older_than_seconds: Only runs that started longer ago may go; None asks for no age.
        max_bytes: Then the oldest runs go until the store takes no more than this.
        work_older_than_seconds: Work that a killed run has left goes when nothing in it was
            written for so long. Until then the next run of the same recipe goes on from it.
    """

    keep_runs: int | None = None
    older_than_seconds: float | None = None
    max_bytes: int | None = None
    work_older_than_seconds: float = 14 * 86400.0


@dataclass(frozen=True)
class Kept:
    """What stays; all else in the survey may go.

    Attributes:
        runs: Their names.
        artifacts: Their names.
    """

    runs: frozenset[str]
    artifacts: frozenset[str]


def choose(found: Survey, policy: RetentionPolicy, *, now: float) -> Kept:
    """What the policy keeps, its `max_bytes` left out.

    Args:
        found: The store.
        policy: What may go.
        now: Unix seconds.
    """
    if found.problem:
        return Kept(frozenset(run.name for run in found.runs), frozenset(found.artifacts))
    cutoff = _cutoff(found.runs, policy)
    runs = [
        run
        for run in found.runs
        if run.pinned or run.running or not _may_go(run.started_at, policy, cutoff, now)
    ]
    # What stands for itself goes as a run of its age would.
    alone = [
        artifact.name
        for artifact in _unclaimed(found)
        if not _may_go(artifact.created_at, policy, cutoff, now)
    ]
    return _kept(found, runs, alone)


def shrink(
    found: Survey, kept: Kept, *, max_bytes: int, size_with: Callable[[Kept], int]
) -> tuple[Kept, int]:
    """Gives up as many of the oldest runs as it takes for the rest to be small enough.

    Args:
        found: The store.
        kept: What is kept so far.
        max_bytes: What the store may take.
        size_with: What the store takes when only this is kept.

    Returns:
        What is kept now, and what that takes: more than `max_bytes` where pinned and running runs
        alone need more.
    """
    if found.problem:
        return kept, size_with(kept)
    runs = [run for run in found.runs if run.name in kept.runs]
    alone = [each for each in _unclaimed(found) if each.name in kept.artifacts]
    givable: list[RunRecord | ArtifactRecord] = [
        *(run for run in runs if not run.pinned and not run.running),
        *alone,
    ]
    oldest_first = [each.name for each in sorted(givable, key=_age)]

    @cache
    def without(num_oldest: int) -> tuple[Kept, int]:
        gone = set(oldest_first[:num_oldest])
        rest = _kept(
            found,
            [run for run in runs if run.name not in gone],
            [artifact.name for artifact in alone if artifact.name not in gone],
        )
        return rest, size_with(rest)

    # The more are given up, the less is left: a search by halves asks for few sizes.
    return without(
        bisect_left(range(len(oldest_first)), True, key=lambda num: without(num)[1] <= max_bytes)
    )


def _age(record: RunRecord | ArtifactRecord) -> tuple[float, str]:
    when = record.started_at if isinstance(record, RunRecord) else record.created_at
    return when, record.name


def _cutoff(runs: Sequence[RunRecord], policy: RetentionPolicy) -> float:
    """From when on everything is kept, because it is among the newest runs."""
    if policy.keep_runs is None:
        return math.inf
    if len(runs) < policy.keep_runs:
        return -math.inf
    newest = sorted(runs, key=_age, reverse=True)[: policy.keep_runs]
    return min((run.started_at for run in newest), default=math.inf)


def _may_go(when: float, policy: RetentionPolicy, cutoff: float, now: float) -> bool:
    if policy.keep_runs is None and policy.older_than_seconds is None:
        return False
    return when < cutoff and now - when > (policy.older_than_seconds or -math.inf)


def _unclaimed(found: Survey) -> list[ArtifactRecord]:
    return [each for each in found.artifacts.values() if each.name not in found.claimed]


def _kept(found: Survey, runs: Iterable[RunRecord], alone: Iterable[str]) -> Kept:
    runs = list(runs)
    roots = {name for run in runs for name in run.artifacts} | set(alone)
    roots |= {each.name for each in found.artifacts.values() if each.in_use}
    names = with_ancestors(roots, found.artifacts)
    return Kept(frozenset(run.name for run in runs), names)


def with_ancestors(roots: Iterable[str], artifacts: Mapping[str, ArtifactRecord]) -> frozenset[str]:
    """Those of the roots that are there, and all that they were made from."""
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in artifacts and name not in reached:
            reached.add(name)
            waiting += artifacts[name].parents
    return frozenset(reached)
