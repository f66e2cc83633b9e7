"""Whole GRPO runs with models that score on GPUs of their own, by `own_scorers_run.py`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.ray.own_scorers_run import NUM_GPUS, NUM_STEPS, SETTINGS
from tests.training import assert_equal_weights

pytestmark = pytest.mark.slow

NUM_ROLLOUTS = SETTINGS["num_prompts_per_step"] * SETTINGS["num_generations_per_prompt"]
# The keys by which a run beside the trainer and one on GPUs of their own must be equal to the bit.
SAME = ("texts", "rewards", "metrics")


def run(case: str, folder: Path) -> dict[str, Any]:
    """In a process of its own, whose Ray no other finds (as in `test_own_placement.py`)."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as place:
        done = subprocess.run(
            [sys.executable, "-m", "tests.ray.own_scorers_run", case, folder],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RAY_TMPDIR": place},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    # All is given back: every GPU, and every reservation.
    assert (found["free GPUs"], found["groups"]) == (NUM_GPUS, ["REMOVED"])
    return found


def assert_complete(of_run: dict[str, Any]) -> None:
    """Every rollout of every step is recorded with a reward, and the scorer tells them apart."""
    assert of_run["errors"] == []
    assert [len(step) for step in of_run["rewards"]] == [NUM_ROLLOUTS] * NUM_STEPS
    assert all(isinstance(each, float) for step in of_run["rewards"] for each in step)
    assert len({each for step in of_run["rewards"] for each in step}) > 1
    assert [each["num_failed_rollouts"] for each in of_run["metrics"]] == [0.0] * NUM_STEPS


def assert_nobody_shares(of_run: dict[str, Any], scorer: str) -> None:
    """Trainer, engine and scorer have a GPU each."""
    places = of_run["places"]
    assert set(places) == {"training", "generation", scorer}
    assert len({tuple(each) for group in places.values() for each in group}) == 3
    assert all(len(group) == 1 for group in places.values())


@pytest.mark.parametrize(
    ("case", "scorer"),
    [
        ("reward_model", "reward model"),
        pytest.param("judge", "judge", marks=pytest.mark.thorough),
    ],
)
def test_a_scorer_on_a_gpu_of_its_own_changes_no_bit_of_training(
    case: str, scorer: str, tmp_path: Path
) -> None:
    found = run(case, tmp_path)
    own, colocated = found["own"], found["colocated"]
    for each in (own, colocated):
        assert_complete(each)
    assert_nobody_shares(own, scorer)
    assert colocated["places"][scorer] == colocated["places"]["training"]
    assert [own[name] for name in SAME] == [colocated[name] for name in SAME]
    assert_equal_weights(Path(own["folder"]), Path(colocated["folder"]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "scorer"),
    [("asynchronous_reward_model", "reward model"), ("asynchronous_judge", "judge")],
)
def test_a_scorer_on_a_gpu_of_its_own_scores_beside_asynchronous_steps(
    case: str, scorer: str, tmp_path: Path
) -> None:
    own = run(case, tmp_path)["own"]
    assert_complete(own)
    assert_nobody_shares(own, scorer)
    assert max(each["staleness_max"] for each in own["metrics"]) <= 1
