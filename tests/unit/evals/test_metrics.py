"""Metrics of rollouts, some of which could not be scored."""

from collections.abc import Sequence

import pytest

from nemo_rl_core.config.evaluation import EvaluationConfig
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.evals.metrics import (
    accuracy_metrics,
    category_metrics,
    category_of,
    evaluation_metrics,
)
from nemo_rl_core.evals.statistics import pass_at_k_interval, wilson_interval
from nemo_rl_core.types import Completion, Prompt, Rollout

COMPLETION = Completion((1,), (0.0,), truncated=False)


def texts(rollouts: Sequence[Rollout]) -> list[str]:
    return [rollout.text.strip() for rollout in rollouts]


def rollout(index: int, text: str, reward: float | None, task: str = "sums") -> Rollout:
    prompt = Prompt(str(index), "?", (1,), "4", task, metadata=f'{{"level": {index % 2}}}')
    error = "the judge was out" if reward is None else None
    return Rollout(prompt, COMPLETION, text, reward=reward, error=error)


GREEDY = [rollout(0, "4", 1.0), rollout(1, "5", 0.5), rollout(2, "?", None), rollout(3, "4", 1.0)]
SAMPLED = [
    # 2 of 3 right; the majority is 4.
    rollout(0, "4", 1.0),
    rollout(0, "5", 0.0),
    rollout(0, "4", 1.0),
    # 1 of 3 right; a tie of three, and the first is 5.
    rollout(1, "5", 0.0),
    rollout(1, "4", 1.0),
    rollout(1, "6", 0.0),
    # One scored: counts only for k = 1.
    rollout(2, "4", 1.0),
    rollout(2, "4", None),
    rollout(2, "4", None),
    # None scored.
    *[rollout(3, "4", None)] * 3,
]


def test_figures_by_hand() -> None:
    config = EvaluationConfig(num_samples_per_prompt=3, ks=[1, 2, 3])
    metrics = evaluation_metrics(GREEDY, SAMPLED, config=config, get_votes=texts)
    low, high = metrics.pop("greedy_accuracy_low"), metrics.pop("greedy_accuracy_high")
    assert 0 < low < 2 / 3 < high < 1
    bounds = {name: metrics.pop(name) for name in list(metrics) if name.endswith(("low", "high"))}
    assert len(bounds) == 2 * 5
    # One of two and two of two prompts, each right or wrong: Wilson's interval.
    for name, num_right in (("cons_at_2", 1), ("cons_at_3", 1), ("pass_at_3", 2)):
        interval = (bounds[f"{name}_low"], bounds[f"{name}_high"])
        assert interval == wilson_interval(num_right, 2, 0.95)
    outcomes = [[True, False, True], [False, True, False]]
    for k, rows in ((1, [*outcomes, [True]]), (2, outcomes)):
        interval = (bounds[f"pass_at_{k}_low"], bounds[f"pass_at_{k}_high"])
        assert interval == pass_at_k_interval(rows, k=k, confidence=0.95)
    assert metrics == pytest.approx(
        {
            "num_prompts": 4,
            "num_unscored": 6,
            "greedy_accuracy": 2 / 3,  # of the three that were scored
            "mean_reward": 2.5 / 3,
            "truncated_fraction": 0,
            "pass_at_1": (2 / 3 + 1 / 3 + 1) / 3,
            # 1 - C(1, 2) / C(3, 2) = 1 and 1 - C(2, 2) / C(3, 2) = 2/3
            "pass_at_2": (1 + 2 / 3) / 2,
            "pass_at_3": 1,
            "cons_at_2": 1 / 2,
            "cons_at_3": 1 / 2,
        }
    )


def test_an_accuracy_without_scored_completions_is_an_error() -> None:
    with pytest.raises(RewardError, match="no completion could be scored") as caught:
        accuracy_metrics([rollout(0, "4", None)])
    assert "the judge was out" in caught.value.got
    assert accuracy_metrics(GREEDY)["unscored_fraction"] == 1 / 4


def test_a_k_without_samples_has_no_metric() -> None:
    config = EvaluationConfig(num_samples_per_prompt=3)
    few = [rollout(0, "4", 1.0), rollout(0, "4", None), rollout(0, "5", None)]
    metrics = evaluation_metrics(GREEDY, few, config=config, get_votes=texts)
    assert metrics["pass_at_1"] == 1
    assert not {"pass_at_3", "pass_at_3_low", "cons_at_3", "cons_at_3_high"} & metrics.keys()


def test_categories_by_task_and_by_metadata() -> None:
    tasks = [rollout(0, "4", 1.0, "a"), rollout(1, "5", 0.0, "b"), rollout(2, "4", 1.0, "b")]
    figures = category_metrics(tasks, tasks, config=EvaluationConfig(ks=[1]), get_votes=texts)
    assert {name: each["greedy_accuracy"] for name, each in figures.items()} == {"a": 1, "b": 0.5}
    assert {name: each["pass_at_1"] for name, each in figures.items()} == {"a": 1, "b": 0.5}
    config = EvaluationConfig(ks=[1], category="level")
    levels = category_metrics(tasks, tasks, config=config, get_votes=texts)
    assert {name: each["num_prompts"] for name, each in levels.items()} == {"0": 2, "1": 1}
    assert category_of(tasks[0], "author") == "none"


def test_a_category_without_scored_completions_is_left_out() -> None:
    mixed = [rollout(0, "4", 1.0, "a"), rollout(1, "4", None, "b")]
    assert list(category_metrics(mixed, [], config=EvaluationConfig(), get_votes=texts)) == ["a"]


def test_more_samples_than_are_drawn_are_refused() -> None:
    with pytest.raises(ValueError, match="ks asks for 8 samples"):
        EvaluationConfig(num_samples_per_prompt=4, ks=[8])
    with pytest.raises(ConfigError, match="unknown key"):
        EvaluationConfig.model_validate({"samples": 4})
    assert EvaluationConfig(num_samples_per_prompt=1).all_ks == [1]


def test_without_samples_there_is_only_greedy_accuracy() -> None:
    greedy = [rollout(0, "4", 1.0), rollout(1, "5", 0.0)]
    config = EvaluationConfig(num_samples_per_prompt=0)
    figures = evaluation_metrics(greedy, [], config=config, get_votes=texts)
    assert figures["greedy_accuracy"] == 0.5
    assert not [name for name in figures if name.startswith(("pass", "cons"))]
    with pytest.raises(ValueError, match="ks asks for 1 samples"):
        EvaluationConfig(num_samples_per_prompt=0, ks=[1])
