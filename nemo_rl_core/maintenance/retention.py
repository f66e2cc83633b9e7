"""Retention of runs and artifacts: pure functions of a survey."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from nemo_rl_core.maintenance.survey import ArtifactRecord, RunRecord, Survey


@dataclass(frozen=True)
class RetentionPolicy:
    """The rules for keeping runs. By default, only artifacts without a run are removed.

    Attributes:
        keep_runs: Number of newest runs to keep; None keeps all.
        older_than_seconds: Minimum age of runs to remove; None for any age.
        work_older_than_seconds: Time without changes after which work of a killed run is removed.
            Until then the next run of the same recipe resumes from it.
    """

    keep_runs: int | None = None
    older_than_seconds: float | None = None
    max_bytes: int | None = None
    work_older_than_seconds: float = 14 * 86400.0


@dataclass(frozen=True)
class Kept:
    """Runs and artifacts to keep; everything else in the survey may be removed."""

    runs: frozenset[str]
    artifacts: frozenset[str]


def choose(surveyed: Survey, policy: RetentionPolicy, *, now: float) -> Kept:
    """Applies the policy, except for `max_bytes`; pinned and running runs stay."""
    if surveyed.problem:
        return Kept(frozenset(run.name for run in surveyed.runs), frozenset(surveyed.artifacts))
    cutoff = _cutoff(surveyed.runs, policy)
    runs = [
        run
        for run in surveyed.runs
        if run.pinned or run.running or not _is_removable(run.started_at, policy, cutoff, now)
    ]
    # An artifact without a run is treated like a run of its age.
    runless = [
        artifact.name
        for artifact in _without_run(surveyed)
        if not _is_removable(artifact.created_at, policy, cutoff, now)
    ]
    return _kept(surveyed, runs, runless)


def shrink(
    surveyed: Survey, kept: Kept, *, max_bytes: int, size_with: Callable[[Kept], int]
) -> tuple[Kept, int]:
    """Drops as few of the oldest runs as possible to make the store small enough.

    Returns what remains and its size, which may exceed `max_bytes` due to pinned and running runs.
    """
    if surveyed.problem:
        return kept, size_with(kept)
    runs = [run for run in surveyed.runs if run.name in kept.runs]
    runless = [each for each in _without_run(surveyed) if each.name in kept.artifacts]
    removable: list[RunRecord | ArtifactRecord] = [
        *(run for run in runs if not run.pinned and not run.running),
        *runless,
    ]
    oldest_first = [each.name for each in sorted(removable, key=_age)]

    @cache
    def without(num_oldest: int) -> tuple[Kept, int]:
        dropped = set(oldest_first[:num_oldest])
        rest = _kept(
            surveyed,
            [run for run in runs if run.name not in dropped],
            [artifact.name for artifact in runless if artifact.name not in dropped],
        )
        return rest, size_with(rest)

    # The size falls with the number of dropped runs, so a binary search needs few sizes.
    return without(
        bisect_left(range(len(oldest_first)), True, key=lambda num: without(num)[1] <= max_bytes)
    )


def _age(record: RunRecord | ArtifactRecord) -> tuple[float, str]:
    when = record.started_at if isinstance(record, RunRecord) else record.created_at
    return when, record.name


def _cutoff(runs: Sequence[RunRecord], policy: RetentionPolicy) -> float:
    """Start of the oldest run among the newest `keep_runs`; later ones are kept."""
    if policy.keep_runs is None:
        return math.inf
    if len(runs) < policy.keep_runs:
        return -math.inf
    newest = sorted(runs, key=_age, reverse=True)[: policy.keep_runs]
    return min((run.started_at for run in newest), default=math.inf)


def _is_removable(when: float, policy: RetentionPolicy, cutoff: float, now: float) -> bool:
    if policy.keep_runs is None and policy.older_than_seconds is None:
        return False
    return when < cutoff and now - when > (policy.older_than_seconds or -math.inf)


def _without_run(surveyed: Survey) -> list[ArtifactRecord]:
    return [each for each in surveyed.artifacts.values() if each.name not in surveyed.claimed]


def _kept(surveyed: Survey, runs: Iterable[RunRecord], runless: Iterable[str]) -> Kept:
    runs = list(runs)
    roots = {name for run in runs for name in run.artifacts} | set(runless)
    roots |= {each.name for each in surveyed.artifacts.values() if each.in_use}
    names = with_ancestors(roots, surveyed.artifacts)
    return Kept(frozenset(run.name for run in runs), names)


def with_ancestors(roots: Iterable[str], artifacts: Mapping[str, ArtifactRecord]) -> frozenset[str]:
    """Returns the existing roots and all their ancestors."""
    reached: set[str] = set()
    queue = list(roots)
    while queue:
        name = queue.pop()
        if name in artifacts and name not in reached:
            reached.add(name)
            queue += artifacts[name].parents
    return frozenset(reached)
