"""Agents train the weights that the same episodes of an environment train, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nemo_rl_core import train
from nemo_rl_core.config.generated_data import GuessNumberData
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.data.datasets.guess_number import load
from nemo_rl_core.games.guess_number import NumberGuess
from nemo_rl_core.trainers.fit.fitting import TrainResult
from tests.unit.agents.test_same_episodes import AGENT, OwnPace

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("session")]


def trained(**options: Any) -> TrainResult:
    data = GuessNumberData(max_number=15, num_train=24, num_validation=8)
    rows = [{**row, "metadata": json.loads(row["metadata"])} for row in load(data, seed=0)[0]]
    return train(
        ModelFromConfig(num_layers=1),
        rows,
        num_steps_per_iteration=2,
        num_prompts_per_step=4,
        num_generations_per_prompt=4,
        generation={"backend": "hf", "max_new_tokens": 4},
        rollouts={"max_turns": 6, "max_rollout_tokens": 84},
        max_prompt_tokens=48,
        seed=3,
        validate_every_num_steps=2,
        cluster={"num_threads": 1},  # the session that tests share; another one would keep its CPUs
        **options,
    )


def weights(result: TrainResult) -> dict[str, Any]:
    (file,) = Path(result.checkpoint).rglob("model.safetensors")
    return load_file(file)


def test_agents_train_the_weights_of_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    agents = trained(environment=AGENT)
    game = trained(reward_fn=OwnPace(NumberGuess, illegal_penalty=0.25))
    names = ("reward", "loss", "validation_reward")
    for step, other in zip(agents.metrics, game.metrics, strict=True):
        assert {name: step.get(name) for name in names} == {name: other.get(name) for name in names}
    assert len({step["reward"] for step in agents.metrics}) == 2
    one, other_weights = weights(agents), weights(game)
    assert one.keys() == other_weights.keys()
    assert all(one[name].equal(other_weights[name]) for name in one)
