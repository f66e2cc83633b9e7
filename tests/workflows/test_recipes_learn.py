"""Every algorithm's default recipe improves on held-out rows.

They take minutes each, so they are not part of `make test`. `make test-slow` runs them one after
another in one store, where later recipes reuse stages of earlier ones.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Any

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes") / "store"


@pytest.fixture
def learn(store: Path, run_recipe: Callable[..., Run]) -> Callable[..., Run]:
    def run(module: str, workflow: str, recipe: dict[str, Any] | None = None) -> Run:
        finished = run_recipe(recipe, store, (module, workflow), timeout_seconds=2000)
        assert finished.exit_code == 0, finished.output[-3000:]
        return finished

    return run


def parents(folder: Path, kind: str) -> list[Path]:
    """Returns the parents of an artifact that have this kind."""
    parents = json.loads((folder / "manifest.json").read_text())["parents"]
    return [Path(parent["path"]) for parent in parents if parent["kind"] == kind]


def promotion(run: Run) -> Path:
    """Returns the folder of the run's promotion."""
    (folder,) = parents(Path(run.value("model:")).parent, "promotion")
    return folder


def decision(run: Run) -> dict[str, float]:
    """Returns the paired difference of greedy accuracies with its interval."""
    figures: dict[str, float] = json.loads((promotion(run) / "decision.json").read_text())
    return figures


def evaluations(run: Run) -> list[dict[str, float]]:
    """Returns the metrics of both models, the less accurate one first."""
    folders = parents(promotion(run), "evaluation")
    figures = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
    return sorted(figures, key=lambda each: each["greedy_accuracy"])


def test_sft(learn: Callable[..., Run]) -> None:
    run = learn("sft", "sft")
    losses = [line["loss"] for line in run.metrics("train_sft")]
    assert sum(losses[-20:]) < 0.3 * sum(losses[:20])
    assert decision(run)["low"] > 0.3


def test_sft_on_text(learn: Callable[..., Run]) -> None:
    run = learn("sft", "sft", {"recipe": "sft_text"})
    losses = [line["loss"] for line in run.metrics("train_sft")]
    assert sum(losses[-20:]) < 0.3 * sum(losses[:20])
    assert decision(run)["low"] > 0.1


def test_grpo(learn: Callable[..., Run]) -> None:
    assert decision(learn("grpo", "grpo"))["low"] > 0.2


def test_a_game_of_several_turns(learn: Callable[..., Run]) -> None:
    run = learn("grpo", "grpo", {"recipe": "grpo_guess_number"})
    before, after = evaluations(run)
    assert decision(run)["difference"] > 0.2
    assert after["greedy_accuracy_low"] > before["greedy_accuracy_high"]


def test_dpo(learn: Callable[..., Run]) -> None:
    run = learn("dpo", "dpo")
    first, *_, last = run.metrics("dpo_iteration 1")
    # The policy still equals the reference, whose logprobs come from the cache. The recipe adds a
    # supervised term to DPO's loss.
    assert first["loss"] - first["sft_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["accuracy"] > 0.6
    assert last["margin"] > 0
    assert decision(run)["low"] > 0


def test_reward_model(learn: Callable[..., Run]) -> None:
    run = learn("reward_model", "reward_model")
    first, *_ = run.metrics("train_reward_model")
    # A head of zeros scores every sequence 0.
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    metrics = json.loads((run.artifact("evaluate_reward_model") / "metrics.json").read_text())
    assert metrics["accuracy_low"] > 0.6


def test_ppo(learn: Callable[..., Run]) -> None:
    run = learn("ppo", "ppo")
    assert decision(run)["low"] > 0.05
    values = [line["explained_variance"] for line in run.metrics("ppo_iteration 2")]
    assert sum(values) / len(values) > 0


def test_distillation(learn: Callable[..., Run]) -> None:
    run = learn("distill", "distill")
    losses = [line["loss"] for line in run.metrics("train_student")]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert decision(run)["low"] > 0.05


def test_post_training(learn: Callable[..., Run]) -> None:
    run = learn("post_train", "post_train")
    stages = {*run.stages("ran"), *run.stages("CACHED")}
    assert {"train_sft", "train_reward_model", "dpo_iteration 1", "grpo_iteration 2"} <= stages
    assert decision(run)["low"] > 0
