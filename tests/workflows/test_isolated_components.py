"""Recipes whose components have packages that conflict with the lock, by the real command."""

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.rollouts.records import RolloutRecords
from tests.commands import REPOSITORY
from tests.isolated_packages import write_package, write_wheel

Run = Any

pytestmark = pytest.mark.thorough
SMALL = {"num_iterations": 1, "num_steps_per_iteration": 1}
CURRENT = REPOSITORY / "deployment" / "requirements" / "verifiers_current.txt"


def small(recipe: dict[str, Any], **sections: Any) -> dict[str, Any]:
    sft, grpo = {**recipe["sft"], "num_steps": 2}, {**recipe["grpo"], **SMALL}
    evaluation = {"num_samples_per_prompt": 1, "environment": {"kind": "exact"}}
    return {**recipe, "sft": sft, "grpo": grpo, "evaluation": evaluation, **sections}


def made(finished: Run) -> tuple[dict[str, Any], set[float | None]]:
    """Returns the isolation in the manifest of GRPO, and the rewards of its first step."""
    assert finished.exit_code == 0, finished.output[-3000:]
    folder = max(
        (finished.store / "artifacts").glob("grpo_iteration-*"),
        key=lambda each: each.stat().st_mtime,
    )
    config = json.loads((folder / "manifest.json").read_text())["config"]
    rollouts = RolloutRecords(folder / "rollouts").load(1)
    return config["isolation"], {rollout.reward for rollout in rollouts}


def test_each_component_has_its_packages_and_only_their_users_run_again(
    recipe: dict[str, Any],
    run_recipe: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    write_wheel(tmp_path / "wheels", "tabulate", "0.1")
    write_wheel(tmp_path / "wheels", "tabulate", "0.2")
    write_package(tmp_path / "site", "tabulate", "0.3")
    pins = tmp_path / "environment.txt"
    pins.write_text("tabulate==0.1\n")
    sections = {
        "environment": {"kind": "function", "target": "tests.custom_environments:without_the_lock"},
        "environment_workers": {"num_workers": 1},
        "isolation": {
            "environment": {"requirements": str(pins)},
            "generation": {"folder": str(tmp_path / "site")},
            "training": {"folder": str(tmp_path / "site")},
        },
    }
    finished = run_recipe(small(recipe, **sections), tmp_path / "store")
    isolation, rewards = made(finished)
    assert rewards == {1.0}
    assert isolation["environment"]["packages"] == ["tabulate==0.1"]
    assert isolation["training"]["packages"][0].startswith("tabulate==0.3 ")
    pins.write_text("# the same\ntabulate==0.1\n")
    assert run_recipe(small(recipe, **sections), tmp_path / "store").stages("ran") == []
    pins.write_text("tabulate==0.2  # newer\n")
    again = run_recipe(small(recipe, **sections), tmp_path / "store")
    assert made(again)[0]["environment"]["packages"] == ["tabulate==0.2"]
    assert "train_sft" in again.stages("CACHED")
    assert any(name.startswith("grpo_iteration") for name in again.stages("ran"))


def test_the_current_verifiers_runs_next_to_a_trainer_with_the_lock(
    recipe: dict[str, Any], run_recipe: Callable[..., Run], tmp_path: Path
) -> None:
    versions = {"verifiers": "0.4.0", "openai": "2.54.0"}
    assert not metadata.version("openai").startswith("2.")
    finished = run_recipe(
        small(
            recipe,
            environment={
                "kind": "python",
                "target": "tests.verifiers_current:TwoTries",
                "arguments": {"versions": versions},
            },
            environment_workers={"num_workers": 1},
            rollouts={"max_turns": 2, "max_rollout_tokens": 16},
            isolation={"environment": {"requirements": str(CURRENT)}},
        ),
        tmp_path / "store",
    )
    isolation, rewards = made(finished)
    assert {f"{name}=={version}" for name, version in versions.items()} <= {
        *isolation["environment"]["packages"]
    }
    assert rewards <= {0.0, 0.5}
