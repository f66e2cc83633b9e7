"""A limit of GPU-hours: the stage that reaches it saves, and resumes with a higher limit."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl_core.errors import ConfigError, ResourceError
from nemo_rl_core.maintenance.collect import find_leftovers
from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.manifest import Manifest, StageRun
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry import budget as telemetry_budget
from nemo_rl_core.telemetry.budget import (
    LIMIT,
    counted_run,
    current_budget,
    limit_from,
    stage_budget,
)
from nemo_rl_core.trainers.loop import StepLoop, StepRange
from tasks.flyte.retries import is_recoverable
from tests.training import CountingPolicy

GPU_SECOND = 1 / 3600
CLUSTER = {"shape": "node_8gpu", "num_workers": 8}


def trained(folder: Path, *, seconds: float = 0.0) -> tuple[CountingPolicy, list[int]]:
    """Runs ten steps of this duration, with a save after every fourth."""
    loop = StepLoop(folder, stage="count", steps=StepRange(1, 10), save_every_num_steps=4)
    policy, seen = CountingPolicy(), []
    for step in loop.steps(policy):
        policy.value += 1
        seen.append(step)
        time.sleep(seconds)
        loop.report(step, {}, {})
    return policy, seen


def test_the_stage_that_reaches_the_limit_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, str(8 * 0.6 * GPU_SECOND))  # 0.6 s of 8 GPUs
    refused = pytest.raises(ResourceError, match="the run has used its GPU-hours")
    with refused as spent, stage_budget(8, [], None):
        trained(tmp_path, seconds=0.4)
    assert "resumes from step 2" in str(spent.value.fix)
    assert not is_recoverable(spent.value), "Flyte must not try again"
    # Without a limit, the run resumes from the save, although none was due.
    monkeypatch.delenv(LIMIT)
    with stage_budget(8, [], None) as budget:
        assert budget is None
        policy, seen = trained(tmp_path)
    assert (policy.value, seen) == (10, [3, 4, 5, 6, 7, 8, 9, 10])


@pytest.mark.slow
def test_the_limit_of_the_recipe_applies_unless_the_variable_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    monkeypatch.delenv(LIMIT, raising=False)
    with counted_run(max_gpu_hours=1) as spending:
        first = made("first", parents={})
        assert spending.max_gpu_hours == 1
        # A busy machine takes longer.
        spending.max_gpu_hours = (spending.gpu_seconds + 8 * 0.2) * GPU_SECOND
        second = made("second", parents={"start": first})
        with pytest.raises(ResourceError, match="has used its GPU-hours"):
            made("third", parents={"start": second})
        monkeypatch.setenv(LIMIT, "1")
        made("third", parents={"start": second})


def test_a_stage_within_the_limit_is_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "1")
    with stage_budget(8, [], None):
        assert trained(tmp_path / "in_time")[1] == [*range(1, 11)]
    monkeypatch.setenv(LIMIT, str(1e-12))
    with stage_budget(0, [], None):  # a laptop
        assert trained(tmp_path / "laptop")[1] == [*range(1, 11)]
    assert current_budget() is None


def made(name: str, *, parents: dict[str, Path], run: StageRun | None = None) -> Path:
    def work(folder: Path) -> StageResult:
        time.sleep(0.4)
        (folder / "a.txt").write_text(name)
        return StageResult("checkpoint", "hf")

    settings = {"name": name, "cluster": CLUSTER}
    return produce(StageInputs(name, settings, parents), work, run=run)


@pytest.mark.slow
def test_stages_of_a_run_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    monkeypatch.setenv(LIMIT, str(8 * 0.6 * GPU_SECOND))
    with counted_run() as spending:
        first = made("first", parents={})
        assert spending.gpu_seconds > 8 * 0.4
        # A busy machine takes longer.
        monkeypatch.setenv(LIMIT, str((spending.gpu_seconds + 8 * 0.2) * GPU_SECOND))
        second = made("second", parents={"start": first})
        with pytest.raises(ResourceError, match="has used its GPU-hours") as refused:
            made("third", parents={"start": second})
    assert "the stage starts" in str(refused.value.fix)
    with counted_run():  # a cached stage costs nothing
        assert made("first", parents={}) == first
        made("third", parents={"start": second})


@pytest.mark.slow
def test_an_execution_counts_ancestors_that_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execution(name: str) -> StageRun:
        return StageRun(execution=name, workflow="w", task="t", attempt=1, started_at=time.time())

    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    monkeypatch.setenv(LIMIT, "1")
    earlier = made("earlier", parents={}, run=execution("yesterday"))
    began = time.monotonic()
    first = made("first", parents={"start": earlier}, run=execution("today"))
    took = time.monotonic() - began
    with stage_budget(8, [first], execution("today")) as budget:
        assert budget is not None
        assert 8 * 0.4 < budget.earlier_seconds < 8 * took, "only of today"
    # A busy machine takes longer.
    monkeypatch.setenv(LIMIT, str((budget.earlier_seconds + 8 * 0.2) * GPU_SECOND))
    second = made("second", parents={"start": first}, run=execution("today"))
    # The first is an ancestor of the second and is counted once.
    with pytest.raises(ResourceError, match="has used its GPU-hours"):
        made("third", parents={"start": second, "reference": first}, run=execution("today"))


def attempt(number: int, *, task: str = "tasks.train_sft.train_sft") -> StageRun:
    return StageRun(
        execution="a7f3", workflow="w", task=task, attempt=number, started_at=time.time()
    )


KILLED = """
import os, signal, sys, time
from nemo_rl_core.store.manifest import StageRun
from nemo_rl_core.telemetry import budget

budget.WRITE_EVERY_SECONDS = 0.1
run = StageRun.model_validate_json(sys.argv[1])
with budget.stage_budget(8, [], run):
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_attempt_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    monkeypatch.setenv(LIMIT, "1")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, attempt(1).model_dump_json()], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    with stage_budget(8, [], attempt(2)) as budget:
        assert budget is not None
        assert budget.earlier_seconds > 8 * 0.5
    monkeypatch.setenv(LIMIT, str(8 * 0.5 * GPU_SECOND))
    with (
        pytest.raises(ResourceError, match="has used its GPU-hours"),
        stage_budget(8, [], attempt(3)),
    ):
        pass


def test_independent_stages_are_counted_once_and_while_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    monkeypatch.setenv(LIMIT, "1")
    monkeypatch.setattr(telemetry_budget, "WRITE_EVERY_SECONDS", 0.05)
    first = made("first", parents={}, run=attempt(1))
    with stage_budget(8, [first], attempt(1, task="evaluate")) as other:
        assert other is not None
        once = other.earlier_seconds
        manifest = Manifest.read(first)
        assert manifest is not None
        assert once == pytest.approx(manifest.cost.gpu_seconds, rel=0.4), (
            "by manifest and note, but once"
        )
        with stage_budget(8, [first], attempt(1, task="train_grpo")) as budget:
            assert budget is not None
            deadline = time.monotonic() + 30.0
            while budget.earlier_seconds < once + 8 * 0.2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert budget.earlier_seconds >= once + 8 * 0.2, "the other one is still running"
    with stage_budget(8, [], attempt(1).model_copy(update={"execution": "b"})) as other:
        assert other is not None
        assert other.earlier_seconds == 0


def test_old_records_of_executions_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    monkeypatch.setenv(LIMIT, "1")
    with stage_budget(8, [], attempt(1)):
        pass
    store, day = Store(tmp_path), 86_400.0
    (folder,) = store.gpu_seconds.iterdir()
    ages = [(time.time(), []), (time.time() + 8 * day, [folder])]
    for now, expected in ages:
        leftovers = find_leftovers(store, older_than_seconds=7 * day, now=now)
        assert [path for path in leftovers if store.gpu_seconds in path.parents] == expected


@pytest.mark.parametrize("text", ["many", "-1", "0", "inf", "nan"])
def test_an_invalid_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a number of GPU-hours"):
        limit_from(text)


def test_a_valid_limit_is_parsed() -> None:
    assert (limit_from("12.5"), limit_from(None), limit_from("")) == (12.5, None, None)
