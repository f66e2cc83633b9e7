"""`global_post_process_and_metrics`: allowed changes, and metrics."""

import math
from typing import Any

import pytest
import torch

from nemo_rl_core.config.environment import ByTask
from nemo_rl_core.environments.by_task import ByTaskEnvironment
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.post_processing import post_process
from nemo_rl_core.errors import ConfigError, RewardError


class Environment:
    """An environment with the given hook."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def global_post_process_and_metrics(self, batch: dict[str, Any]) -> Any:
        return self._hook(batch)


def halved(batch: dict[str, Any]) -> Any:
    """Changes rewards in place, and returns a tensor as a metric, as many environments do."""
    batch["rewards"] /= 2
    return batch, {"mean": batch["rewards"].mean(), "rows": len(batch["tasks"])}


def batch_of(*rewards: float, tasks: str) -> dict[str, Any]:
    logprobs = torch.tensor([[-math.inf, math.nan]] * len(rewards))
    return {
        "rewards": torch.tensor(rewards),
        "generation_logprobs": logprobs,
        "tasks": list(tasks),
    }


def test_rewards_may_change_but_the_input_batch_does_not() -> None:
    batch = batch_of(1.0, 3.0, tasks="ab")
    rewards, metrics = post_process(Environment(halved), batch)
    assert rewards.tolist() == [0.5, 1.5]
    assert metrics == {"mean": 1.0, "rows": 2.0}
    assert batch["rewards"].tolist() == [1.0, 3.0]


def test_integer_rewards_and_extra_columns_are_accepted() -> None:
    hook = lambda batch: ({**batch, "rewards": torch.tensor([2, 3]), "mine": 1}, {})  # noqa: E731
    rewards, metrics = post_process(Environment(hook), batch_of(1.0, 3.0, tasks="ab"))
    assert (rewards.dtype, rewards.tolist(), metrics) == (torch.float32, [2, 3], {})


def test_an_environment_without_the_method_changes_nothing() -> None:
    batch = batch_of(1.0, tasks="a")
    assert post_process(object(), batch) == (batch["rewards"], {})


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda batch: {}[0], "KeyError"),
        (lambda batch: batch, "ValueError: too many values to unpack"),
        (lambda batch: (None, {}), "TypeError"),
        (
            lambda batch: ({"rewards": batch["rewards"]}, {}),
            "changed columns: generation_logprobs, tasks",
        ),
        (lambda batch: ({**batch, "tasks": ["b", "a"]}, {}), "changed columns: tasks"),
        (lambda batch: ({**batch, "generation_logprobs": torch.zeros(2, 2)}, {}), "generation_log"),
        (lambda batch: ({**batch, "rewards": [1.0, 2.0]}, {}), "2 finite rewards in a tensor"),
        (lambda batch: ({**batch, "rewards": torch.zeros(1)}, {}), "2 finite rewards"),
        (lambda batch: ({**batch, "rewards": torch.tensor([1.0, math.nan])}, {}), "nan"),
        (
            lambda batch: ({**batch, "rewards": torch.full((2,), 1e300, dtype=torch.float64)}, {}),
            "2 finite",
        ),
        (lambda batch: (batch, {"won": math.nan}), "won = nan"),
        (lambda batch: (batch, {"won": "all"}), "won = 'all'"),
    ],
)
def test_an_invalid_result_is_refused(hook: Any, words: str) -> None:
    with pytest.raises(RewardError, match="of the environment 'Environment' failed") as refused:
        post_process(Environment(hook), batch_of(1.0, 3.0, tasks="ab"))
    assert words in str(refused.value)


def test_an_error_of_this_project_is_not_wrapped() -> None:
    def hook(batch: dict[str, Any]) -> Any:
        raise ConfigError("no such level")

    with pytest.raises(ConfigError, match="no such level"):
        post_process(Environment(hook), batch_of(1.0, tasks="a"))


def test_each_environment_gets_the_rows_of_its_task() -> None:
    parts = {"a": Environment(halved), "b": Environment(lambda batch: (batch, {"of_b": 1}))}
    batch = batch_of(4.0, 5.0, 6.0, tasks="aba")
    rewards, metrics = post_process(ByTaskEnvironment(parts), batch)
    assert rewards.tolist() == [2, 5, 3]
    assert metrics == {"a_mean": 2.5, "a_rows": 2, "b_of_b": 1}


def test_games_and_scorers_in_one_batch_have_their_metrics() -> None:
    tasks = [
        {"task": "guess_number", "environment": {"kind": "guess_number"}},
        {"task": "sums", "environment": {"kind": "exact"}},
    ]
    scorer = make_scorer(ByTask.model_validate({"tasks": tasks}))
    batch = {"rewards": torch.tensor([1.0, 0.5, -0.5]), "tasks": ["guess_number", "sums"] * 2}
    batch["tasks"] = ["guess_number", "sums", "guess_number"]
    _, metrics = post_process(scorer.environment, batch)
    assert metrics == {"guess_number_won_fraction": 0.5, "sums_mean_reward": 0.5}
