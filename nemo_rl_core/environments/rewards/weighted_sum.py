"""Weighted sum of several rewards."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from nemo_rl_core.environments.interfaces import Scorer, checked, error_context, raise_first
from nemo_rl_core.errors import NotApplicableError, RewardError
from nemo_rl_core.types import Prompt, Rollout


class WeightedSumScorer(Scorer):
    """Computes `sum_k weight_k * reward_k`; if a part fails, the rollout has no score.

    A part that does not apply to a completion (a function that returns None) is left out of its
    sum, and is `nan` in its components; if no part applies, the rollout has no score.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        weights: Sequence[float],
        names: Sequence[str] | None = None,
    ) -> None:
        self._scorers = list(scorers)
        self._weights = list(weights)
        self._names = unique_names(names or [])

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one outcome per rollout: the sum, or the error of the first part that fails."""
        return [
            parts if isinstance(parts, RewardError) else self._sum(parts)
            for parts in self._components(rollouts)
        ]

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns the rollouts with the sum as reward and the unweighted parts as components."""
        return [
            rollout.failed(parts.in_one_line)
            if isinstance(parts, RewardError)
            else replace(rollout, reward=self._sum(parts), components=parts)
            for rollout, parts in zip(rollouts, self._components(rollouts), strict=True)
        ]

    def missing_columns(self, prompt: Prompt) -> list[str]:
        """Returns the columns that any part lacks."""
        return list(
            dict.fromkeys(name for each in self._scorers for name in each.missing_columns(prompt))
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the unchanged batch and the mean of each part by its name."""
        return batch, component_means(batch, self._names)

    def release_memory(self) -> None:
        """Releases the memory of every part."""
        for scorer in self._scorers:
            scorer.release_memory()

    def close(self) -> None:
        """Closes every part, even if closing one of them fails."""
        with ExitStack() as stack:
            for scorer in self._scorers:
                stack.callback(scorer.close)

    def _components(self, rollouts: Sequence[Rollout]) -> list[tuple[float, ...] | RewardError]:
        columns = [scorer.score(rollouts) for scorer in self._scorers]
        rows = map(_all_or_first_failure, zip(*columns, strict=True))
        return [self._checked(parts, each) for parts, each in zip(rows, rollouts, strict=True)]

    def _checked(
        self, parts: tuple[float, ...] | RewardError, rollout: Rollout
    ) -> tuple[float, ...] | RewardError:
        if isinstance(parts, RewardError):
            return parts
        total = checked(self._sum(parts), **error_context(rollout, "the weighted sum"))
        return total if isinstance(total, RewardError) else parts

    def _sum(self, parts: tuple[float, ...]) -> float:
        return sum(
            weight * part
            for weight, part in zip(self._weights, parts, strict=True)
            if not math.isnan(part)
        )


def unique_names(names: Sequence[str]) -> list[str]:
    """Numbers repeated names: the second `name` becomes `name_2`.

    Example:
        >>> unique_names(["near", "exact", "near"])
        ['near', 'exact', 'near_2']
    """
    return [
        name if index == names.index(name) else f"{name}_{list(names[: index + 1]).count(name)}"
        for index, name in enumerate(names)
    ]


def component_means(batch: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Returns the mean of each column of `reward_components [B, K]` over the rows it applies to."""
    if not names:
        return {}
    means = batch["reward_components"].nanmean(dim=0).tolist()
    return {name: mean for name, mean in zip(names, means, strict=True) if not math.isnan(mean)}


def _all_or_first_failure(
    outcomes: tuple[float | RewardError, ...],
) -> tuple[float, ...] | RewardError:
    applies = [each for each in outcomes if not isinstance(each, NotApplicableError)]
    try:
        raise_first(applies or outcomes)
    except RewardError as error:
        return error
    return tuple(each if isinstance(each, float | int) else math.nan for each in outcomes)
