"""Metrics of an evaluation; a completion without a reward is counted separately, not as wrong."""

import json
from collections.abc import Sequence

from nemo_rl_core.config.evaluation import EvaluationConfig
from nemo_rl_core.errors import RewardError
from nemo_rl_core.evals.consensus import GetVotes, consensus_at_k
from nemo_rl_core.evals.statistics import (
    Interval,
    mean_pass_at_k,
    pass_at_k_interval,
    wilson_interval,
)
from nemo_rl_core.types import Rollout

FULL_SCORE = 1.0
"""Reward of a correct completion; partial credit counts in `mean_reward`."""


def is_correct(rollout: Rollout) -> bool | None:
    """Returns whether the completion has the full score; None if it could not be scored."""
    return None if rollout.reward is None else rollout.reward >= FULL_SCORE


def category_of(rollout: Rollout, name: str) -> str:
    """Returns the rollout's task, or another key of its metadata; `none` without the key."""
    if name == "task":
        return rollout.prompt.task
    return str(json.loads(rollout.prompt.metadata).get(name, "none"))


def accuracy_metrics(greedy: Sequence[Rollout]) -> dict[str, float]:
    """Returns `accuracy`, `mean_reward`, `truncated_fraction` and `unscored_fraction`.

    Accuracy and mean reward are those of the scored completions; it is an error if there are none.
    """
    scored = _scored(greedy)
    return {
        "accuracy": sum(is_correct(each) is True for each in scored) / len(scored),
        "mean_reward": sum(rollout.reward or 0.0 for rollout in scored) / len(scored),
        "truncated_fraction": sum(r.completion.truncated for r in greedy) / len(greedy),
        "unscored_fraction": 1 - len(scored) / len(greedy),
    }


def evaluation_metrics(
    greedy: Sequence[Rollout],
    sampled: Sequence[Rollout],
    *,
    config: EvaluationConfig,
    get_votes: GetVotes,
) -> dict[str, float]:
    """Returns greedy accuracy, pass@k and cons@k, each with its interval over prompts.

    Greedy accuracy and cons@k have Wilson's interval, pass@k has `pass_at_k_interval`.

    Completions that could not be scored are left out of every mean and counted in `num_unscored`. A
    prompt with fewer than k scored samples is left out for k; a k without any such prompt has no
    metric. The samples of a prompt come in the order of sampling.
    """
    figures = accuracy_metrics(greedy)
    scored = _scored(greedy)
    num_correct = sum(is_correct(each) is True for each in scored)
    interval = wilson_interval(num_correct, len(scored), config.confidence)
    unscored = [rollout for rollout in (*greedy, *sampled) if rollout.reward is None]
    return {
        "num_prompts": float(len(greedy)),
        "num_unscored": float(len(unscored)),
        **_with_interval("greedy_accuracy", figures["accuracy"], interval),
        "mean_reward": figures["mean_reward"],
        "truncated_fraction": figures["truncated_fraction"],
        **_sampled_metrics(sampled, config, get_votes),
    }


def category_metrics(
    greedy: Sequence[Rollout],
    sampled: Sequence[Rollout],
    *,
    config: EvaluationConfig,
    get_votes: GetVotes,
) -> dict[str, dict[str, float]]:
    """Returns `evaluation_metrics` by category, without categories in which nothing was scored."""

    def of(rollouts: Sequence[Rollout], name: str) -> list[Rollout]:
        return [each for each in rollouts if category_of(each, config.category) == name]

    names = sorted({category_of(each, config.category) for each in greedy if _is_scored(each)})
    return {
        name: evaluation_metrics(
            of(greedy, name), of(sampled, name), config=config, get_votes=get_votes
        )
        for name in names
    }


def _sampled_metrics(
    sampled: Sequence[Rollout], config: EvaluationConfig, get_votes: GetVotes
) -> dict[str, float]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in filter(_is_scored, sampled):
        groups.setdefault(rollout.prompt.id, []).append(rollout)
    outcomes = [[bool(is_correct(each)) for each in group] for group in groups.values()]
    answers = [get_votes(group) for group in groups.values()]
    metrics: dict[str, float] = {}
    for k in config.all_ks:
        enough = [index for index, group in enumerate(outcomes) if len(group) >= k]
        if not enough:
            continue
        samples = [outcomes[index] for index in enough]
        passed = pass_at_k_interval(samples, k=k, confidence=config.confidence)
        metrics |= _with_interval(f"pass_at_{k}", mean_pass_at_k(samples, k=k), passed)
        if k > 1:
            agreed = [consensus_at_k(answers[index], outcomes[index], k) for index in enough]
            # One right or wrong majority per prompt: a proportion, like greedy accuracy.
            agreement_interval = wilson_interval(sum(agreed), len(agreed), config.confidence)
            metrics |= _with_interval(f"cons_at_{k}", sum(agreed) / len(agreed), agreement_interval)
    return metrics


def _with_interval(name: str, value: float, interval: Interval) -> dict[str, float]:
    return {name: value, f"{name}_low": interval.lower, f"{name}_high": interval.upper}


def _is_scored(rollout: Rollout) -> bool:
    return rollout.reward is not None


def _scored(rollouts: Sequence[Rollout]) -> list[Rollout]:
    scored = list(filter(_is_scored, rollouts))
    if not scored:
        first = next((each.error for each in rollouts if each.error), "no rollouts at all")
        raise RewardError(
            "no completion could be scored, so there is no accuracy",
            expected="a reward for at least one completion",
            got=f"{len(rollouts)} without one; the first error: {first}",
            fix="fix the environment; a completion without a reward does not count as wrong",
        )
    return scored
