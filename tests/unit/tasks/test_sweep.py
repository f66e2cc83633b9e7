"""A sweep's recipe: its points, and its refusals."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from flytekit import map_task
from flytekit.types.directory import FlyteDirectory

from nemo_rl_core.produce import StageInputs, StageResult, produce
from tasks.artifacts import PointReport
from tasks.plan_tasks.sweep import plan_sweep
from tasks.recipes.common import RecipeError
from tasks.recipes.sweep import PointTaskConfig, SummaryTaskConfig, SweepRecipe
from tasks.summarize_sweep import summarize_sweep
from tasks.sweep_point import sweep_point

BASE = {"recipe": "grpo_arithmetic"}


def sweep(**over: Any) -> SweepRecipe:
    return SweepRecipe.model_validate({"base": BASE, "over": over})


def test_points_are_all_combinations_merged_into_the_recipe() -> None:
    config = sweep(seed=[0, 3], **{"grpo.learning_rate": [1e-4, 2e-4], "grpo.loss.kl.beta": [0.1]})
    assert len(config.points) == 4
    assert config.points[1] == {"seed": 0, "grpo.learning_rate": 2e-4, "grpo.loss.kl.beta": 0.1}
    last = config.experiment(config.points[-1])
    assert (last.seed, last.grpo.learning_rate) == (3, 2e-4)
    assert last.grpo.num_iterations == config.base.grpo.num_iterations


def test_points_that_differ_only_in_the_algorithm_share_their_start() -> None:
    plan = plan_sweep(config=sweep(seed=[0, 1], **{"grpo.learning_rate": [1e-4, 2e-4]}))
    starts = [(each.model, each.data, each.questions, each.sft) for each in plan.points]
    assert starts[0] == starts[1] != starts[2] == starts[3]
    assert len({str(each.point) for each in plan.points}) == 4


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"grpo.lerning_rate": [1e-4]}, "lerning_rate"),
        ({"seed": []}, "one or more values"),
        ({"measure_base": [True]}, "a sweep does not evaluate models before"),
        ({"seed": [1, 1]}, "one or more values, each once"),
        ({"grpo.learning_rate": [-1.0]}, "learning_rate"),
    ],
)
def test_invalid_sweeps_are_refused(over: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        config = sweep(**over)
        [config.experiment(point) for point in config.points]


def test_gpus_are_refused_where_points_would_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    over = {"seed": [0, 1]}
    base = {**BASE, "cluster": {"shape": "node_8gpu"}}
    config = SweepRecipe.model_validate({"base": base, "over": over})
    assert len(plan_sweep(config=config).points) == 2  # on one machine
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "of-a-container")
    with pytest.raises(Exception, match="points of a sweep have no GPUs on a cluster"):
        plan_sweep.task_function(config=config)
    assert len(plan_sweep.task_function(config=sweep(seed=[0])).points) == 1


def test_the_summary_gathers_points_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    values = [{"seed": seed, "rate": rate} for seed in (0, 1) for rate in (1, 2)]
    reports: list[PointReport | None] = [
        point(index, accuracy) for index, accuracy in enumerate([0.5, 0.75, 0.7, 0.25])
    ]
    reports[3] = None  # the last one failed, and the recipe lets it
    summary = summarize_sweep.task_function(
        config=SummaryTaskConfig(points=values, confidence=0.95), reports=reports
    )
    sweep = json.loads((summary.folder / "sweep.json").read_text())
    assert sweep["points"] == [
        {"point": {"seed": 0, "rate": 1}, "accuracy": 0.5},
        {"point": {"seed": 0, "rate": 2}, "accuracy": 0.75},
        {"point": {"seed": 1, "rate": 1}, "accuracy": 0.7},
        {"point": {"seed": 1, "rate": 2}, "accuracy": None},
    ]
    one, two = sweep["settings"]
    assert (one["fields"], one["mean"]) == ({"rate": 1}, pytest.approx(0.6))
    # Student's interval of 0.5 and 0.7 is 0.6 ± 12.706 · 0.1.
    assert (one["low"], one["high"]) == (0, 1)
    assert (two["accuracies"], two["num_failed"], two["low"]) == ({"0": 0.75}, 1, None)
    # A failed seed keeps a setting from being the leader, though its mean is the highest.
    assert (sweep["leader"], sweep["best"]) == ({"rate": 1}, None)
    assert summary.summary.startswith("3 of 4 points; no best setting at 95 % confidence: rate 1 ")
    deck = (summary.folder / "deck.html").read_text()
    assert deck.count("<polyline") == 3
    assert "seed 1, rate 1" in deck
    assert deck.count(">failed<") == 2  # the heading and the point
    assert ">7.5<" in deck  # seconds of a point
    assert ">0.0<" not in deck
    assert "None" not in deck
    assert len(summary.manifest.parents) == 3


def point(index: int, accuracy: float) -> PointReport:
    def work(folder: Path) -> StageResult:
        (folder / "point.json").write_text(json.dumps([index, accuracy]))
        return StageResult("sweep_point", "json", figures={"wall_seconds": 7.5})

    folder = produce(StageInputs("sweep_point", {"index": index}), work)
    return PointReport(
        directory=FlyteDirectory(str(folder), remote_directory=False),
        stage="sweep_point",
        content_hash=str(index),
        metrics={"greedy_accuracy": accuracy},
        steps=[1, 2],
        rewards=[0.1, accuracy],
    )


def test_the_points_are_one_mapped_task_that_may_lose_some() -> None:
    mapped = map_task(sweep_point, concurrency=2, min_success_ratio=0.5)
    assert get_args(mapped.python_interface.inputs["config"]) == (PointTaskConfig,)
    assert "Optional" in str(mapped.python_interface.outputs["o0"])
