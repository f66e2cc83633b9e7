"""Metrics of an evaluation: a completion without a reward is counted, and never wrong."""

import json
from collections.abc import Sequence

from nemo_rl_core.config.evaluation import EvaluationConfig
from nemo_rl_core.errors import RewardError
from nemo_rl_core.evals.consensus import GetVotes, consensus_at_k
from nemo_rl_core.evals.pass_at_k import mean_pass_at_k, pass_at_k_interval
from nemo_rl_core.evals.statistics import Interval, wilson_interval
from nemo_rl_core.types import Rollout

FULL_SCORE = 1.0
"""A completion counts as correct when it gets this; partial credit counts in `mean_reward`."""


def is_correct(rollout: Rollout) -> bool | None:
    """Returns whether the completion has the full score; None if it could not be scored."""
    return None if rollout.reward is None else rollout.reward >= FULL_SCORE


def category_of(rollout: Rollout, name: str) -> str:
    """The rollout's category.

    Args:
        rollout: A rollout.
        name: `task`, or a key of the row's metadata; a row without the key is in category `none`.
    """
    if name == "task":
        return rollout.prompt.task
    return str(json.loads(rollout.prompt.metadata).get(name, "none"))


def accuracy_metrics(greedy: Sequence[Rollout]) -> dict[str, float]:
    """`accuracy` and `mean_reward` of the scored, `truncated_fraction` and `unscored_fraction`.

    Raises:
        RewardError: If not one completion could be scored.
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
    """Greedy accuracy, pass@k and cons@k, each with its interval over prompts.

    Greedy accuracy and cons@k have Wilson's interval, pass@k has `pass_at_k_interval`.

    Completions that could not be scored are left out of every mean and counted in `num_unscored`. A
    prompt with fewer than k scored samples is left out for k; a k without any such prompt has no
    metric.

    Args:
        greedy: One rollout per prompt.
        sampled: Several per prompt, samples of one prompt in the order of sampling.
        config: The values of k, and the confidence.
        get_votes: Returns the answers that the completions of a prompt vote for.

    Returns:
        `num_prompts`, `num_unscored`, `greedy_accuracy`, `mean_reward` and `truncated_fraction` of
        the greedy completions, `pass_at_<k>`, and `cons_at_<k>` for k > 1; with `_low` and `_high`
        each of `greedy_accuracy`, `pass_at_<k>` and `cons_at_<k>`.

    Raises:
        RewardError: If not one greedy completion could be scored.
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
    """`evaluation_metrics` of each category, by name; of one in which nothing was scored, none."""

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
            # A majority is right or not, once a prompt: a proportion like greedy accuracy.
            of_prompts = wilson_interval(sum(agreed), len(agreed), config.confidence)
            metrics |= _with_interval(f"cons_at_{k}", sum(agreed) / len(agreed), of_prompts)
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
            "not one completion could be scored, so there is no accuracy",
            expected="a reward for at least one completion",
            got=f"{len(rollouts)} without one; the first error: {first}",
            fix="repair the environment; a completion without a reward is not counted as wrong",
        )
    return scored
