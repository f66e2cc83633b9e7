"""Notices of runs on a cluster and here, posted to a real server on loopback."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError

from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.manifest import StageRun
from nemo_rl_core.telemetry.events import StageRecord
from tasks.announce import announce
from tasks.artifacts import EvalReport, LineageReport, PromotionDecision
from tasks.plan_tasks.grpo import record_failure
from tasks.recipes.grpo import GRPORecipe
from tasks.stage.notifying import NOTHING_NEW, successful_end
from tests.notice_servers import hook

SHARED = {"content_hash": "ab" * 32, "stage": "x"}


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """A container of the execution `today` with a webhook in its environment."""
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "today")
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_WORKFLOW", "workflows.grpo.grpo")
    monkeypatch.delenv("NEMO_RL_SMTP", raising=False)
    with hook() as (address, found):
        monkeypatch.setenv("NEMO_RL_NOTIFY", address)
        yield found


def announced(execution: str | None) -> None:
    """Ends a workflow whose report was made by an execution; by none on a single machine."""

    def work(folder: Path) -> StageResult:
        (folder / "lineage.json").write_text("[]")
        return StageResult("lineage", "json")

    run = None
    if execution is not None:
        run = StageRun(
            execution=execution, workflow="w", task="t", attempt=1, started_at=time.time()
        )
    folder = produce(StageInputs("lineage_report", {}, part=str(execution)), work, run=run)
    directory = FlyteDirectory(str(folder))
    decision = PromotionDecision(
        directory=directory, summary="promoted: +1.0", promoted=True, difference=1, low=1, high=1,
        **SHARED,
    )  # fmt: skip
    after = EvalReport(
        directory=directory, summary="greedy 0.99", metrics={}, measured="x", **SHARED
    )
    lineage = LineageReport(directory=directory, **SHARED)
    announce.task_function(decision=decision, after=after, lineage=lineage)


def test_a_run_on_a_cluster_sends_its_results(posted: list[dict[str, Any]]) -> None:
    announced("today")
    (notice,) = posted
    assert notice["text"] == "nemo-rl: grpo today succeeded\npromoted: +1.0\ngreedy 0.99"


def test_a_completely_cached_run_is_reported_as_such(posted: list[dict[str, Any]]) -> None:
    announced("yesterday")
    (notice,) = posted
    assert notice["text"] == f"nemo-rl: grpo today ended\n{NOTHING_NEW}"


def test_a_failed_run_on_a_cluster_reports_the_reason(posted: list[dict[str, Any]]) -> None:
    error = FlyteError(message="no such object", failed_node_id="n1")
    record_failure.task_function(config=GRPORecipe(), err=error)
    (notice,) = posted
    assert notice["text"] == "nemo-rl: grpo today failed\nno such object"


def test_a_local_run_sends_its_notice_itself(
    posted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the task nor the handler, which local runs call as well."""
    monkeypatch.delenv("FLYTE_INTERNAL_EXECUTION_ID")
    announced(None)
    record_failure.task_function(config=GRPORecipe(), err=None)
    assert posted == []


def test_nothing_is_new_if_every_stage_was_cached() -> None:
    cached, ran = StageRecord("a", "cached", 0.1), StageRecord("b", "ran", 1.0)
    assert successful_end([cached, cached], ["x"]) == ("ended", [NOTHING_NEW, "x"])
    assert successful_end([cached, ran], ["x"]) == ("succeeded", ["x"])
    assert successful_end([], ["x"]) == ("succeeded", ["x"])
