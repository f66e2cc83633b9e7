"""Retention on surveys of records, without files."""

import pytest

from nemo_rl_core.maintenance.retention import Kept, RetentionPolicy, choose, shrink
from nemo_rl_core.maintenance.survey import ArtifactRecord, RunRecord, Survey

DAY = 86400.0
NOW = 100 * DAY


def _run(name: str, days_old: float, *artifacts: str, **flags: bool) -> RunRecord:
    return RunRecord(name, NOW - days_old * DAY, frozenset(artifacts), **flags)


def _artifact(name: str, days_old: float, *parents: str, in_use: bool = False) -> ArtifactRecord:
    return ArtifactRecord(name, NOW - days_old * DAY, frozenset(parents), in_use)


def _survey(
    runs: list[RunRecord], artifacts: list[ArtifactRecord], *claimed: str, problem: str = ""
) -> Survey:
    used = frozenset().union(*(run.artifacts for run in runs), claimed)
    return Survey(tuple(runs), {each.name: each for each in artifacts}, used, problem)


THREE = [_run("old", 40, "a"), _run("middle", 20, "b"), _run("new", 1, "c")]


@pytest.mark.parametrize(
    ("policy", "runs"),
    [
        (RetentionPolicy(), "old middle new"),
        (RetentionPolicy(keep_runs=3), "old middle new"),
        (RetentionPolicy(keep_runs=2), "middle new"),
        (RetentionPolicy(keep_runs=0), ""),
        (RetentionPolicy(older_than_seconds=10 * DAY), "new"),
        (RetentionPolicy(older_than_seconds=0), ""),
        (RetentionPolicy(older_than_seconds=50 * DAY), "old middle new"),
        # Both: only runs beyond the number that are also older.
        (RetentionPolicy(keep_runs=2, older_than_seconds=10 * DAY), "middle new"),
        (RetentionPolicy(keep_runs=1, older_than_seconds=30 * DAY), "middle new"),
    ],
)
def test_runs_are_kept_by_number_and_age(policy: RetentionPolicy, runs: str) -> None:
    artifacts = [_artifact("a", 40), _artifact("b", 20), _artifact("c", 1)]
    kept = choose(_survey(THREE, artifacts), policy, now=NOW)
    assert kept.runs == set(runs.split())
    of = {"old": "a", "middle": "b", "new": "c"}
    assert kept.artifacts == {of[run] for run in kept.runs}


def test_pinned_and_running_runs_are_kept_at_any_age() -> None:
    runs = [_run("a", 9), _run("pinned", 8, "p", pinned=True), _run("works", 7, running=True)]
    kept = choose(_survey(runs, [_artifact("p", 8)]), RetentionPolicy(keep_runs=0), now=NOW)
    assert kept == Kept(frozenset({"pinned", "works"}), frozenset({"p"}))


def test_ancestors_of_kept_artifacts_are_kept_but_not_cousins() -> None:
    artifacts = [
        _artifact("data", 9), _artifact("sft", 9, "data", "gone"), _artifact("grpo", 1, "sft"),
        _artifact("other", 9, "data"),
    ]  # fmt: skip
    surveyed = _survey([_run("r", 1, "grpo")], artifacts, "data", "sft", "other")
    assert choose(surveyed, RetentionPolicy(), now=NOW).artifacts == {"data", "sft", "grpo"}


def test_artifacts_in_use_are_kept_with_their_ancestors() -> None:
    artifacts = [_artifact("data", 9), _artifact("used", 9, "data", in_use=True)]
    kept = choose(_survey([], artifacts, "data", "used"), RetentionPolicy(keep_runs=0), now=NOW)
    assert kept.artifacts == {"data", "used"}


@pytest.mark.parametrize(
    ("policy", "stays"),
    [
        (RetentionPolicy(), True),
        (RetentionPolicy(keep_runs=2), False),  # older than both
        (RetentionPolicy(keep_runs=3), True),  # there would be room for a third run
        (RetentionPolicy(keep_runs=0), False),
        (RetentionPolicy(older_than_seconds=29 * DAY), False),
        (RetentionPolicy(older_than_seconds=31 * DAY), True),
    ],
)
def test_an_artifact_without_a_run_is_treated_like_a_run_of_its_age(
    policy: RetentionPolicy, stays: bool
) -> None:
    runs = [_run("a", 20), _run("b", 10)]
    kept = choose(_survey(runs, [_artifact("runless", 30)]), policy, now=NOW)
    assert kept.artifacts == ({"runless"} if stays else set())


def test_an_unreadable_history_keeps_everything() -> None:
    surveyed = _survey(THREE, [_artifact("a", 99), _artifact("x", 99)], problem="damaged")
    kept = choose(surveyed, RetentionPolicy(keep_runs=0), now=NOW)
    assert kept == Kept(frozenset({"old", "middle", "new"}), frozenset({"a", "x"}))
    assert shrink(surveyed, kept, max_bytes=0, size_with=lambda _: 1) == (kept, 1)


def test_the_oldest_runs_are_removed_until_the_rest_fits() -> None:
    runs = [_run("pinned", 50, "p", pinned=True), *THREE]
    sizes = {"p": 5, "a": 10, "x": 20, "b": 40, "c": 80}
    surveyed = _survey(runs, [_artifact(name, 30) for name in sizes])
    everything = choose(surveyed, RetentionPolicy(), now=NOW)

    def fit(max_bytes: int) -> tuple[str, int]:
        kept, size = shrink(
            surveyed, everything, max_bytes=max_bytes,
            size_with=lambda kept: sum(sizes[name] for name in kept.artifacts),
        )  # fmt: skip
        return "".join(sorted(kept.artifacts)), size

    assert fit(155) == ("abcpx", 155)
    assert fit(154) == ("bcpx", 145)  # 40 days
    assert fit(144) == ("bcp", 125)  # 30 days: the one without a run
    assert fit(100) == ("cp", 85)
    assert fit(1) == ("p", 5)  # nothing else can be removed
