"""Agents train the weights that the same episodes of an environment train, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nemo_rl_core import train
from nemo_rl_core.config.generated_data import GuessNumberData
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.data.datasets.generated import guess_number_rows
from nemo_rl_core.games.guess_number import NumberGuess
from nemo_rl_core.trainers.fit.fitting import TrainResult
from tests.unit.agents.test_same_episodes import AGENT, OwnPace
from tests.unit.algorithms.grpo.test_tool_training import TOOLS, taught_model

__all__ = ["taught_model"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("session")]


def trained(**options: Any) -> TrainResult:
    data = GuessNumberData(max_number=15, num_train=24, num_validation=8)
    games, _ = guess_number_rows(data, seed=0)
    rows = [{**row, "metadata": json.loads(row["metadata"])} for row in games]
    game = {
        "model": ModelFromConfig(num_layers=1),
        "dataset": rows,
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "generation": {"backend": "hf", "max_new_tokens": 4},
        "rollouts": {"max_turns": 6, "max_rollout_tokens": 84},
        "max_prompt_tokens": 48,
    }
    return train(
        num_steps_per_iteration=2,
        seed=3,
        validate_every_num_steps=2,
        cluster={"num_threads": 1},  # the session that tests share; another one would keep its CPUs
        **{**game, **options},
    )


def weights(result: TrainResult) -> dict[str, Any]:
    (file,) = Path(result.checkpoint).rglob("model.safetensors")
    return load_file(file)


def test_agents_train_the_weights_of_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    agents = trained(environment=AGENT)
    assert_equal(agents, trained(reward_fn=OwnPace(NumberGuess, illegal_penalty=0.25)))


def test_agents_with_tools_train_the_weights_of_the_tools(
    taught_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    options: dict[str, Any] = {
        "model": str(taught_model),
        "dataset": [{"prompt": "2+3?", "answer": "5"}],
        "validation": [{"prompt": "2+4?", "answer": "6"}],
        "num_prompts_per_step": 1,
        "num_generations_per_prompt": 8,
        "generation": {"backend": "hf", "max_new_tokens": 200},
        "rollouts": {"max_turns": 3, "max_rollout_tokens": 500},
        "max_prompt_tokens": 1024,
        "learning_rate": 0.001,
    }
    agent = {**AGENT, "target": "tests.unit.agents.tool_agent:run"}
    assert_equal(trained(environment=agent, **options), trained(environment=TOOLS, **options))


def assert_equal(agents: TrainResult, game: TrainResult) -> None:
    names = ("reward", "loss", "validation_reward")
    for step, other in zip(agents.metrics, game.metrics, strict=True):
        assert {name: step.get(name) for name in names} == {name: other.get(name) for name in names}
    assert len({step["reward"] for step in agents.metrics}) == 2
    one, other_weights = weights(agents), weights(game)
    assert one.keys() == other_weights.keys()
    assert all(one[name].equal(other_weights[name]) for name in one)
