"""Complete GRPO runs with scoring models on separate GPUs, by `dedicated_scorers_run.py`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.ray.dedicated_scorers_run import NUM_GPUS, NUM_STEPS, SETTINGS
from tests.training import assert_equal_weights

pytestmark = pytest.mark.slow

NUM_ROLLOUTS = SETTINGS["num_prompts_per_step"] * SETTINGS["num_generations_per_prompt"]
# Values that must be bitwise identical with a scorer on the trainer's GPU and on a separate one.
SAME = ("texts", "rewards", "metrics")


def run(case: str, folder: Path) -> dict[str, Any]:
    """Runs in a separate process whose Ray is private (see `test_dedicated_placement.py`)."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.ray.dedicated_scorers_run", case, folder],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RAY_TMPDIR": ray_folder},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    outcome: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    # Everything is released: every GPU and every reservation.
    assert (outcome["free GPUs"], outcome["groups"]) == (NUM_GPUS, ["REMOVED"])
    return outcome


def assert_complete(of_run: dict[str, Any]) -> None:
    """Checks that every rollout is recorded with a reward, and that rewards differ."""
    assert of_run["errors"] == []
    assert [len(step) for step in of_run["rewards"]] == [NUM_ROLLOUTS] * NUM_STEPS
    assert all(isinstance(each, float) for step in of_run["rewards"] for each in step)
    assert len({each for step in of_run["rewards"] for each in step}) > 1
    assert [each["num_failed_rollouts"] for each in of_run["metrics"]] == [0.0] * NUM_STEPS


def assert_nobody_shares(of_run: dict[str, Any], scorer: str) -> None:
    """Checks that trainer, engine and scorer have one GPU each."""
    locations = of_run["locations"]
    assert set(locations) == {"training", "generation", scorer}
    assert len({tuple(each) for group in locations.values() for each in group}) == 3
    assert all(len(group) == 1 for group in locations.values())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "scorer"),
    [
        ("reward_model", "reward model"),
        pytest.param("judge", "judge", marks=pytest.mark.thorough),
    ],
)
def test_a_scorer_on_a_dedicated_gpu_trains_bitwise_identically(
    case: str, scorer: str, tmp_path: Path
) -> None:
    outcomes = run(case, tmp_path)
    separate, colocated = outcomes["own"], outcomes["colocated"]
    for each in (separate, colocated):
        assert_complete(each)
    assert_nobody_shares(separate, scorer)
    assert colocated["locations"][scorer] == colocated["locations"]["training"]
    assert [separate[name] for name in SAME] == [colocated[name] for name in SAME]
    assert_equal_weights(Path(separate["folder"]), Path(colocated["folder"]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "scorer"),
    [("asynchronous_reward_model", "reward model"), ("asynchronous_judge", "judge")],
)
def test_a_scorer_on_a_dedicated_gpu_scores_during_asynchronous_steps(
    case: str, scorer: str, tmp_path: Path
) -> None:
    separate = run(case, tmp_path)["own"]
    assert_complete(separate)
    assert_nobody_shares(separate, scorer)
    assert max(each["staleness_max"] for each in separate["metrics"]) <= 1
