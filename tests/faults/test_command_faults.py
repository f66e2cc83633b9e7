"""The user's command, with its engine killed in the middle of a step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.commands import RECIPE, run, step_metrics

pytestmark = pytest.mark.thorough

NUM_STEPS = 8
SMALL: dict[str, Any] = {
    **RECIPE,
    "sft": {**RECIPE["sft"], "num_steps": 2},
    # Long enough for a step to have a middle.
    "generation": {"max_new_tokens": 48},
    "grpo": {**RECIPE["grpo"], "num_iterations": 1, "num_steps_per_iteration": NUM_STEPS},
}


@dataclass(frozen=True)
class Iteration:
    """Output of a run and the artifact of its iteration."""

    output: str
    artifact: Path

    def figures(self, name: str) -> list[float]:
        """Returns that metric of every step."""
        return [metrics[name] for metrics in step_metrics(self.artifact)]


def run_iteration(store: Path, *, save_every_num_steps: int) -> Iteration:
    """Runs one iteration; changing `save_every_num_steps` retrains with unchanged weights."""
    grpo = {**SMALL["grpo"], "save_every_num_steps": save_every_num_steps}
    before = iterations(store)
    finished = run({**SMALL, "grpo": grpo}, store)
    assert finished.exit_code == 0, finished.output[-3000:]
    (made,) = iterations(store) - before
    return Iteration(finished.output, made)


def iterations(store: Path) -> set[Path]:
    """Returns the artifacts of GRPO."""
    return {path.parent for path in store.glob("artifacts/grpo_iteration-*/manifest.json")}


def test_an_engine_that_is_killed_in_the_middle_of_a_step_costs_nothing(
    killer: Callable[..., Any], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    undisturbed = run_iteration(store, save_every_num_steps=4)
    assert undisturbed.figures("num_engine_restarts") == [0] * NUM_STEPS
    assert "engine restarts" not in undisturbed.output

    def has_trained() -> bool:
        reports = store.glob("work/grpo_iteration-*/metrics.jsonl")
        return any(report.stat().st_size for report in reports)

    kill = killer("VllmBackend.generate", when=has_trained)
    kill.start()
    disturbed = run_iteration(store, save_every_num_steps=3)
    assert kill.join() == ["ray::VllmBackend.generate"]
    restarts = disturbed.figures("num_engine_restarts")
    assert restarts[0] == 0
    assert sum(restarts) == 1
    assert disturbed.figures("num_failed_rollouts") == [0] * NUM_STEPS
    # Reported on the terminal, in the final table and in the log.
    assert "worker 0 of 'generation' died; the engine is started again" in disturbed.output
    stage = [line for line in disturbed.output.splitlines() if "grpo_iteration 1  ran" in line]
    assert "engine restarts 1" in stage[0]
    log = max((store / "runs").glob("*/run.log"))
    assert "the engine is started again" in log.read_text()
    weights = [each.artifact / "model" / "model.safetensors" for each in (undisturbed, disturbed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
