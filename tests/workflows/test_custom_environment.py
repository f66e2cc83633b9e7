"""Runs a recipe with a custom environment and reward by the real command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.rollouts.records import RolloutRecords

Run = Any

pytestmark = pytest.mark.thorough


def test_a_recipe_takes_an_environment_and_a_reward_that_needs_the_answer(
    recipe: dict[str, Any], run_recipe: Callable[..., Run], tmp_path: Path
) -> None:
    environment = {
        "kind": "python",
        "target": "tests.custom_environments:SumTool",
        "arguments": {"unit": "+", "wrong": 0.125},
    }
    small = {
        **recipe,
        "sft": {**recipe["sft"], "num_steps": 2},
        "grpo": {**recipe["grpo"], "num_iterations": 1, "num_steps_per_iteration": 1},
        "environment": environment,
        "rollouts": {"max_turns": 2, "max_rollout_tokens": 16},
        "evaluation": {
            "num_samples_per_prompt": 1,
            "environment": {"kind": "function", "target": "tests.custom_environments:closeness"},
        },
    }
    finished = run_recipe(small, tmp_path / "store")
    assert finished.exit_code == 0, finished.output[-3000:]
    (folder,) = (finished.store / "artifacts").glob("grpo_iteration-*")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["config"]["environment"] == environment
    assert manifest["config"]["reward_content"]
    rollouts = RolloutRecords(folder / "rollouts").load(1)
    assert {len(rollout.turn_rewards) for rollout in rollouts} == {2}
    assert {rollout.turn_rewards[1] for rollout in rollouts} <= {0.125, 1.0}
