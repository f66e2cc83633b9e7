"""The command of a user, whose engine is killed in the middle of a step."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_STEPS = 8
RECIPE: dict[str, Any] = {
    "model": {
        "kind": "from_config",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 1,
        "num_heads": 2,
    },
    "data": {"kind": "arithmetic", "num_train": 64, "num_validation": 16, "max_operand": 9},
    "sft": {"num_steps": 2, "global_batch_size": 16},
    "grpo": {
        "num_iterations": 1,
        "num_steps_per_iteration": NUM_STEPS,
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
    },
    # Long enough for a step to have a middle.
    "generation": {"max_new_tokens": 48},
    "cluster": {"num_threads": 1},
    "evaluation": {"num_samples_per_prompt": 2},
}


@dataclass(frozen=True)
class Run:
    """What a run left: its terminal, and what its iteration made."""

    output: str
    artifact: Path

    def figures(self, name: str) -> list[float]:
        """That metric of every step."""
        lines = (self.artifact / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["metrics"][name] for line in lines]


def run(store: Path, **grpo: int) -> Run:
    recipe = {**RECIPE, "grpo": {**RECIPE["grpo"], **grpo}}
    before = iterations(store)
    finished = subprocess.run(
        [
            Path(sys.executable).with_name("pyflyte"),
            *("run", "workflows/grpo.py", "grpo", "--config", json.dumps(recipe)),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "NEMO_RL_HOME": str(store)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
    (made,) = iterations(store) - before
    return Run(finished.stdout, made)


def iterations(store: Path) -> set[Path]:
    """The artifacts of GRPO."""
    return {path.parent for path in store.glob("artifacts/grpo_iteration-*/manifest.json")}


def test_an_engine_that_is_killed_in_the_middle_of_a_step_costs_nothing(
    killer: Callable[..., Any], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    undisturbed = run(store)
    assert undisturbed.figures("num_engine_restarts") == [0] * NUM_STEPS
    assert "engine restarts" not in undisturbed.output

    def has_trained() -> bool:
        reports = store.glob("work/grpo_iteration-*/metrics.jsonl")
        return any(report.stat().st_size for report in reports)

    kill = killer("VllmBackend.generate", when=has_trained)
    kill.start()
    # When it saves changes no weight, but is a reason to train again; earlier stages are cached.
    disturbed = run(store, save_every_num_steps=3)
    assert kill.join() == ["ray::VllmBackend.generate"]
    restarts = disturbed.figures("num_engine_restarts")
    assert restarts[0] == 0
    assert sum(restarts) == 1
    assert disturbed.figures("num_failed_rollouts") == [0] * NUM_STEPS
    # Heard of on the terminal, in the table at the end, and in the log.
    assert "worker 0 of 'generation' died; the engine is started again" in disturbed.output
    stage = [line for line in disturbed.output.splitlines() if "grpo_iteration 1  ran" in line]
    assert "engine restarts 1" in stage[0]
    log = max((store / "runs").glob("*/run.log"))
    assert "the engine is started again" in log.read_text()
    weights = [each.artifact / "model" / "model.safetensors" for each in (undisturbed, disturbed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
