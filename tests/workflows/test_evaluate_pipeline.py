"""Evaluates and compares a trained model and its starting model, with caching."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Any

pytestmark = pytest.mark.thorough


def test_two_models_on_the_same_prompts(
    first_run: Run, recipe: dict[str, Any], run_recipe: Callable[..., Run], tmp_path: Path
) -> None:
    trained = first_run.artifact("export")
    comparison = {
        "recipe": "evaluate_arithmetic",
        **{key: recipe[key] for key in ("data", "generation", "cluster")},
        "model": {"name": str(trained)},
        "baseline": recipe["model"],
        "evaluation": {"num_samples_per_prompt": 2, "ks": [1, 2]},
    }
    # A separate store, as other tests count the artifacts in the store of the first run.
    store, workflow = tmp_path / "store", ("evaluate", "evaluate_model")
    run = run_recipe(comparison, store, workflow)
    assert run.exit_code == 0, run.output[-3000:]
    measured = ["prepare_model", "evaluate_questions", "evaluate"]
    assert run.stages("ran") == [*measured, "prepare_model", "evaluate", "compare"]
    compared = json.loads((run.artifact("compare") / "comparison.json").read_text())
    assert compared["num_prompts"] == recipe["data"]["num_validation"]
    assert compared["difference"] == pytest.approx(compared["after"] - compared["before"])
    assert f"{trained.name} against " in run.output
    again = run_recipe(comparison, store, workflow)
    assert again.stages("ran") == []
    assert again.exit_code == 0
    command = next(line for line in run.lines if line.startswith("completions: "))
    shown = subprocess.run(
        [*command.split()[1:], "-n", "2"],
        env={**os.environ, "NEMO_RL_HOME": str(store)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.endswith("2 of 16 greedy completions\n")
