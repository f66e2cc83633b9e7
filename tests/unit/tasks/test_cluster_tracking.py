"""Reports to a receiver of metrics of how a stage and a run on a cluster have ended."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.error.error import FlyteError

from nemo_rl_core.telemetry.events import report
from nemo_rl_core.types import StepReport
from tasks.plan_tasks.grpo import record_failure
from tasks.recipes.grpo import GRPORecipe
from tasks.stage.container import TRACKING, track_end, tracked_stage
from tests.otlp_receiver import OtlpReceiver
from tests.unit.tasks.test_notifying import announced

STAGE, RUN = "nemo_rl_stage_end_time_seconds", "nemo_rl_run_end_time_seconds"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[OtlpReceiver]:
    """Variables of a container of the execution `today`, which a schedule has started."""
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "today")
    monkeypatch.setenv(
        "FLYTE_INTERNAL_EXECUTION_WORKFLOW", "nemo-rl:production:workflows.grpo.grpo"
    )
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_LAUNCHPLAN", "nemo-rl:production:nightly_grpo")
    for name in ("NEMO_RL_NOTIFY", "NEMO_RL_SMTP"):
        monkeypatch.delenv(name, raising=False)
    made = OtlpReceiver("today")
    trackers = [{"kind": "otlp", "endpoint": made.address}]
    section = {"trackers": trackers, "sample_machine_every_seconds": None}
    monkeypatch.setenv(TRACKING, json.dumps(section))
    yield made
    made.close()


def ends(receiver: OtlpReceiver) -> dict[str, dict[str, str]]:
    """The labels of the gauges of ends in the last request, by name."""
    return {name: dict(labels) for name, labels in receiver.points() if name in (STAGE, RUN)}


@pytest.mark.parametrize(
    ("error", "outcome"), [(None, "succeeded"), (FlyteRecoverableException("lost"), "failed")]
)
def test_the_end_of_a_stage_does_not_end_its_run(
    receiver: OtlpReceiver, error: Exception | None, outcome: str
) -> None:
    with suppress(FlyteRecoverableException), tracked_stage():
        report(StepReport("grpo_iteration", 1, 2, {"loss": 0.5}))
        if error is not None:
            raise error
    (labels,) = ends(receiver).values()
    assert labels == {
        **{"run": "today", "workflow": "grpo", "recipe": "nightly_grpo"},
        **{"stage": "grpo_iteration", "outcome": outcome},
    }
    assert [*ends(receiver)] == [STAGE]


def test_a_failed_run_is_reported_by_its_handler(receiver: OtlpReceiver) -> None:
    error = FlyteError(message="out of attempts", failed_node_id="n3")
    record_failure.task_function(config=GRPORecipe(), err=error)
    labels = {"run": "today", "workflow": "grpo", "recipe": "nightly_grpo", "outcome": "failed"}
    assert ends(receiver) == {RUN: labels}


def test_a_local_run_and_one_without_trackers_report_nothing(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("FLYTE_INTERNAL_EXECUTION_ID")
        track_end("failed")
    monkeypatch.delenv(TRACKING)
    track_end("failed")
    assert receiver.requests == []


def test_a_successful_run_is_reported_by_its_last_task(receiver: OtlpReceiver) -> None:
    announced("today")
    assert ends(receiver)[RUN]["outcome"] == "succeeded"


@pytest.mark.slow
def test_an_unreachable_receiver_does_not_end_a_run(receiver: OtlpReceiver) -> None:
    receiver.close()
    track_end("succeeded")
    assert receiver.requests == []
