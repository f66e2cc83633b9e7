"""Agents, and the engine that they call, are killed in a run: it loses counted episodes or none."""

from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.fit.fitting import TrainResult
from tests.faults.conftest import Killer
from tests.ray.test_agents import trained
from tests.training import assert_equal_weights
from tests.unit.agents.test_process import processes_with

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("session")]

AGENT = {
    "kind": "agent",
    "target": "tests.unit.agents.faulty_agent:run",
    "max_concurrent": 8,
    "variables": ["AGENT_FAULT", "NEMO_RL_HOME"],
}
Play = Callable[..., TrainResult]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    def play(fault: str, **options: Any) -> TrainResult:
        home = tmp_path_factory.mktemp("home")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AGENT_FAULT", fault)
            patch.setenv("NEMO_RL_HOME", str(home))
            rollouts = {"max_turns": 3, "max_rollout_tokens": 84, "max_failed_fraction": 0.6}
            result = trained(environment=AGENT, rollouts=rollouts, **options)
        assert not processes_with(f"NEMO_RL_HOME={home}", named="agents/")
        return result

    return play


@pytest.fixture(scope="module")
def failed(play: Play) -> TrainResult:
    """A run whose agents raise an error in the episodes that a fault hits."""
    return play("error")


@pytest.fixture(scope="module")
def undisturbed(play: Play) -> TrainResult:
    return play("none")


def counts(result: TrainResult, name: str) -> list[float]:
    return [each[name] for each in result.metrics]


def errors(result: TrainResult) -> list[str]:
    records = RolloutRecords(result.folder / "rollouts")
    return [each.error for step in (1, 2) for each in records.load(step) if each.error]


@pytest.mark.parametrize("fault", ["kill between calls", "kill in call"])
def test_an_agent_that_is_killed_is_a_failed_episode(
    play: Play, failed: TrainResult, fault: str
) -> None:
    result = play(fault)
    assert counts(result, "num_failed_rollouts") == counts(failed, "num_failed_rollouts")
    assert min(counts(result, "num_failed_rollouts")) > 0
    assert ["exit code -9" in each for each in errors(result)] == [True] * len(errors(failed))
    assert_equal_weights(result.folder, failed.folder)


@pytest.mark.parametrize("wait_seconds", [0.0, 0.01, 0.2])
def test_an_engine_that_is_killed_under_agents_costs_nothing(
    play: Play, undisturbed: TrainResult, wait_seconds: float
) -> None:
    kill = Killer("HuggingFaceBackend", wait_seconds=wait_seconds)
    result = play("none", callbacks=[kill])
    assert kill.join()
    assert counts(result, "num_engine_restarts") == [0, 1]
    assert counts(result, "num_failed_rollouts") == [0, 0]
    assert_equal_weights(result.folder, undisturbed.folder)
