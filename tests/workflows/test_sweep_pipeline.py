"""A sweep with the real command, in which some points fail, followed by reruns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.history.queries import History
from nemo_rl_core.store.store import Store

Run = Any

pytestmark = pytest.mark.thorough

SWEEP = ("sweep", "sweep")
RATES = [1e-4, 2e-4]
REWARD, BROKEN = (f"tests.workflows.rewards:{name}" for name in ("digits", "out_of_reach"))


@pytest.fixture(scope="module")
def swept(recipe: dict[str, Any]) -> dict[str, Any]:
    short = {
        **recipe,
        "environment": {"kind": "function", "target": REWARD},
        "grpo": {**recipe["grpo"], "num_iterations": 1, "num_steps_per_iteration": 2},
    }
    over = {"grpo.learning_rate": RATES, "environment.target": [REWARD, BROKEN]}
    return {"base": short, "over": over, "min_success_ratio": 0.5}


@pytest.fixture(scope="module")
def full_run(
    swept: dict[str, Any], run_recipe: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    finished = run_recipe(swept, tmp_path_factory.mktemp("sweep") / "store", SWEEP)
    assert finished.exit_code == 0, finished.output[-3000:]
    return finished


def test_points_share_early_stages_and_are_summarized(full_run: Run) -> None:
    assert full_run.stages("ran") == [
        "prepare_model",
        "prepare_data",
        "train_sft",
        "sweep_point",
        "summarize_sweep",
    ]
    sweep = json.loads((full_run.artifact("summarize_sweep") / "sweep.json").read_text())
    assert len(sweep["points"]) == 4
    good = [each["fields"] for each in sweep["settings"] if each["mean"] is not None]
    assert [fields["grpo.learning_rate"] for fields in good] == RATES
    assert {fields["environment.target"] for fields in good} == {REWARD}
    assert [each["num_failed"] for each in sweep["settings"]] == [0, 1, 0, 1]
    assert sweep["best"] is None
    for rate in RATES:
        assert full_run.value(f"point learning_rate {rate}, target {BROKEN}:") == "failed"
    deck = (full_run.artifact("summarize_sweep") / "deck.html").read_text()
    assert deck.count("<polyline") == len(RATES)


def test_a_failed_point_is_reported_and_only_it_is_retried(
    full_run: Run, swept: dict[str, Any], run_recipe: Callable[..., Run]
) -> None:
    reasons = [line for line in full_run.lines if "16 of 16 rollouts could not be scored" in line]
    assert [line.partition("  FAILED")[0] for line in reasons] == [
        f"sweep_point (learning_rate {rate}, target {BROKEN})" for rate in RATES
    ]
    before = {path.name for path in (full_run.store / "artifacts").iterdir()}
    good = {**swept, "over": {**swept["over"], "environment.target": [REWARD]}}
    again = run_recipe(good, full_run.store, SWEEP)
    assert again.exit_code == 0, again.output[-3000:]
    made = {path.name for path in (again.store / "artifacts").iterdir()} - before
    assert [name.rpartition("-")[0] for name in made] == ["summarize_sweep"]
    third = run_recipe(good, full_run.store, SWEEP)
    assert third.stages("ran") == []
    assert third.exit_code == 0


def test_the_record_has_the_steps_and_artifacts_of_every_point(full_run: Run) -> None:
    with History(Store(full_run.store)) as history:
        run = history.executions().items[-1]
        nodes = history.nodes(run.id)
        trained = [node for node in nodes if node.name == "grpo_iteration 1"]
        assert [node.point["grpo.learning_rate"] for node in trained] == [
            rate for rate in RATES for _ in (REWARD, BROKEN)
        ]
        for node in trained:
            if node.state == "failed":
                continue
            curves = history.metrics(node.id)
            assert [step for step, _ in curves["reward"]] == [1, 2]
            assert curves["learning_rate"][-1][1] == node.point["grpo.learning_rate"]
            artifact = history.artifact(history.node(node.id).outputs[0].artifact or "")
            assert artifact.made_by == node.id


def test_too_few_points_end_the_sweep(
    full_run: Run, swept: dict[str, Any], run_recipe: Callable[..., Run]
) -> None:
    failed = run_recipe({**swept, "min_success_ratio": 0.75}, full_run.store, SWEEP)
    assert failed.exit_code == 1
    assert "rollouts could not be scored" in failed.output
    assert "Traceback" not in failed.output
    record = next((Path(full_run.store) / "failures").glob("*-sweep.json"))
    assert "could not be scored" in json.loads(record.read_text())["error"]
