"""Runs a recipe with a custom loss and advantage by the real command, and again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.telemetry.metrics import MetricsFile

pytestmark = pytest.mark.thorough


def test_a_recipe_takes_a_loss_and_an_advantage(
    recipe: dict[str, Any], run_recipe: Callable[..., Any], tmp_path: Path
) -> None:
    loss = {"kind": "function", "target": "tests.custom_functions:reinforce"}
    advantage = {"kind": "function", "target": "tests.custom_functions:of_tokens"}
    small = {
        **recipe,
        "sft": {**recipe["sft"], "num_steps": 2},
        "grpo": {
            **recipe["grpo"],
            "num_iterations": 1,
            "num_steps_per_iteration": 2,
            "loss": {**loss, "needs_reference": True},
            "advantage": advantage,
        },
    }
    finished = run_recipe(small, tmp_path / "store")
    assert finished.exit_code == 0, finished.output[-3000:]
    (folder,) = (finished.store / "artifacts").glob("grpo_iteration-*")
    config = json.loads((folder / "manifest.json").read_text())["config"]["grpo"]
    assert config["loss"]["source"] and config["advantage"]["source"]
    steps = [line.metrics for line in MetricsFile(folder / "metrics.jsonl").read()]
    assert [step["my_metric"] for step in steps] == [1.0, 1.0]
    again = run_recipe(small, tmp_path / "store")
    assert again.exit_code == 0 and len(list(folder.parent.glob("grpo_iteration-*"))) == 1
