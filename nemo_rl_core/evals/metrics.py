"""Figures out of judged completions; what nobody could judge is counted apart, never as wrong."""

import json
from collections.abc import Sequence

from nemo_rl_core.config.evaluation import EvaluationConfig
from nemo_rl_core.errors import RewardError
from nemo_rl_core.evals.consensus import ExtractAnswer, consensus_at_k
from nemo_rl_core.evals.statistics import mean_pass_at_k, wilson_interval
from nemo_rl_core.types import Rollout

FULL_SCORE = 1.0
"""A completion counts as correct when it gets this; partial credit counts in `mean_reward`."""


def is_correct(rollout: Rollout) -> bool | None:
    """Whether the completion has the full score; None where it could not be judged."""
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
    """`accuracy` and `mean_reward` of the judged, `truncated_fraction` and `unjudged_fraction`.

    Raises:
        RewardError: If not one completion could be judged.
    """
    judged = _judged(greedy)
    return {
        "accuracy": sum(is_correct(each) is True for each in judged) / len(judged),
        "mean_reward": sum(rollout.reward or 0.0 for rollout in judged) / len(judged),
        "truncated_fraction": sum(r.completion.truncated for r in greedy) / len(greedy),
        "unjudged_fraction": 1 - len(judged) / len(greedy),
    }


def evaluation_metrics(
    greedy: Sequence[Rollout],
    sampled: Sequence[Rollout],
    *,
    config: EvaluationConfig,
    extract: ExtractAnswer,
) -> dict[str, float]:
    """Greedy accuracy with Wilson's interval, and pass@k and cons@k.

    Completions that could not be judged are left out of every mean and counted in `num_unjudged`. A
    prompt with fewer than k judged samples says nothing about k and is left out there; a k that no
    prompt has samples for has no figure.

    Args:
        greedy: One rollout a prompt.
        sampled: Several a prompt, those of one prompt in the order they were drawn.
        config: Which k, and the confidence.
        extract: Reads the answer that a completion votes for.

    Returns:
        `num_prompts`, `num_unjudged`, `greedy_accuracy` with `_low` and `_high`, `mean_reward` and
        `truncated_fraction` of the greedy completions, `pass_at_<k>`, and `cons_at_<k>` for k > 1.

    Raises:
        RewardError: If not one greedy completion could be judged.
    """
    figures = accuracy_metrics(greedy)
    judged = _judged(greedy)
    num_correct = sum(is_correct(each) is True for each in judged)
    low, high = wilson_interval(num_correct, len(judged), config.confidence)
    unjudged = [rollout for rollout in (*greedy, *sampled) if rollout.reward is None]
    return {
        "num_prompts": float(len(greedy)),
        "num_unjudged": float(len(unjudged)),
        "greedy_accuracy": figures["accuracy"],
        "greedy_accuracy_low": low,
        "greedy_accuracy_high": high,
        "mean_reward": figures["mean_reward"],
        "truncated_fraction": figures["truncated_fraction"],
        **_sampled_metrics(sampled, config.all_ks, extract),
    }


def category_metrics(
    greedy: Sequence[Rollout],
    sampled: Sequence[Rollout],
    *,
    config: EvaluationConfig,
    extract: ExtractAnswer,
) -> dict[str, dict[str, float]]:
    """`evaluation_metrics` of each category, by name; of one in which nothing was judged, none."""

    def of(rollouts: Sequence[Rollout], name: str) -> list[Rollout]:
        return [each for each in rollouts if category_of(each, config.category) == name]

    names = sorted({category_of(each, config.category) for each in greedy if _is_judged(each)})
    return {
        name: evaluation_metrics(
            of(greedy, name), of(sampled, name), config=config, extract=extract
        )
        for name in names
    }


def _sampled_metrics(
    sampled: Sequence[Rollout], ks: Sequence[int], extract: ExtractAnswer
) -> dict[str, float]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in filter(_is_judged, sampled):
        groups.setdefault(rollout.prompt.id, []).append(rollout)
    outcomes = [[bool(is_correct(each)) for each in group] for group in groups.values()]
    answers = [[extract(each.text) for each in group] for group in groups.values()]
    metrics = {}
    for k in ks:
        enough = [place for place, group in enumerate(outcomes) if len(group) >= k]
        if not enough:
            continue
        metrics[f"pass_at_{k}"] = mean_pass_at_k([outcomes[place] for place in enough], k=k)
        if k > 1:
            agreed = [consensus_at_k(answers[place], outcomes[place], k) for place in enough]
            metrics[f"cons_at_{k}"] = sum(agreed) / len(agreed)
    return metrics


def _is_judged(rollout: Rollout) -> bool:
    return rollout.reward is not None


def _judged(rollouts: Sequence[Rollout]) -> list[Rollout]:
    judged = list(filter(_is_judged, rollouts))
    if not judged:
        first = next((each.error for each in rollouts if each.error), "no rollouts at all")
        raise RewardError(
            "not one completion could be judged, so there is no accuracy",
            expected="a reward for at least one completion",
            got=f"{len(rollouts)} without one; the first says: {first}",
            fix="repair the environment; what it could not judge is not counted as wrong",
        )
    return judged
