"""SFT, reward model, DPO and GRPO in one run of a few steps, and a rerun with other settings."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

Run = Any

pytestmark = pytest.mark.thorough

POST_TRAIN = ("post_train", "post_train")
STAGES = [
    "prepare_model",
    "prepare_data",
    "train_sft",
    "evaluate",
    "sample_pairs 1",
    "sample_pairs 1",
    "train_reward_model",
    "evaluate_reward_model",
    "cache_reference_logprobs",
    "dpo_iteration 1",
    "evaluate",
    "grpo_iteration 1",
    "evaluate",
    "promote",
    "export",
    "lineage_report",
]


@pytest.fixture(scope="module")
def short(recipe: dict[str, Any]) -> dict[str, Any]:
    return {
        **recipe,
        "environment": {"kind": "function", "target": "tests.workflows.rewards:digits"},
        "pairs": {"kind": "rollouts", "num_generations_per_prompt": 4},
        "reward_model": {"num_steps": 3, "num_pairs_per_step": 4},
        "dpo": {"num_steps_per_iteration": 3, "num_pairs_per_step": 4},
        "grpo": {**recipe["grpo"], "num_iterations": 1, "num_steps_per_iteration": 2},
    }


@pytest.fixture(scope="module")
def first_run(
    short: dict[str, Any],
    run_recipe: Callable[..., Run],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    finished = run_recipe(short, tmp_path_factory.mktemp("post_train") / "store", POST_TRAIN)
    assert finished.exit_code == 0, finished.output[-3000:]
    return finished


def test_every_stage_runs_once(first_run: Run) -> None:
    # DPO's pairs are those of the reward model, so the second asking for them is a hit.
    assert first_run.stages("ran") == STAGES
    assert first_run.stages("CACHED") == ["sample_pairs 1"]


def test_dpo_begins_at_ln_2_with_cached_reference_logprobs(first_run: Run) -> None:
    first = first_run.metrics("dpo_iteration 1")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first_run.metrics("train_reward_model")[0]["loss"] == pytest.approx(
        math.log(2), abs=1e-6
    )


def test_grpo_maximizes_the_reward_model_of_the_same_run(first_run: Run) -> None:
    manifest = json.loads((first_run.artifact("grpo_iteration 1") / "manifest.json").read_text())
    parents = {parent["stage"] for parent in manifest["parents"]}
    assert {"train_reward_model", "dpo_iteration 1"} <= parents
    assert manifest["config"]["environment"]["kind"] == "reward_model"
    rows = pd.read_parquet(
        first_run.artifact("grpo_iteration 1") / "rollouts" / "step_000001.parquet"
    )
    shares = [
        sum(character.isdigit() for character in text) / max(len(text), 1)
        for text in rows["completion"]
    ]
    # The reward model scores them, not the function that scored the pairs.
    assert not np.allclose(rows["reward"], shares, atol=1e-3)
    assert rows["reward"].nunique() > 1


def test_the_lineage_has_all_ancestors_of_the_model(first_run: Run) -> None:
    lineage = Path(first_run.value("lineage:")).with_name("lineage.json")
    stages = {row["stage"] for row in json.loads(lineage.read_text())}
    expected = {"prepare_model", "prepare_data train", "train_sft", "evaluate", "promote"}
    assert expected <= stages


def test_other_settings_of_dpo_find_pairs_and_logprobs_in_the_cache(
    first_run: Run, short: dict[str, Any], run_recipe: Callable[..., Run]
) -> None:
    dpo = {
        "num_steps_per_iteration": 2,
        "num_pairs_per_step": 2,
        "learning_rate": 2e-4,
        "loss": {"kind": "sigmoid", "beta": 0.3},
    }
    again = run_recipe({**short, "dpo": dpo}, first_run.store, POST_TRAIN)
    assert again.exit_code == 0, again.output[-3000:]
    cached = again.stages("CACHED")
    assert cached[: len(STAGES[:9]) + 1] == [*STAGES[:8], "sample_pairs 1", STAGES[8]]
    assert again.stages("ran")[0] == "dpo_iteration 1"
