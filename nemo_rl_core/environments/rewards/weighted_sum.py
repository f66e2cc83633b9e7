"""Several rewards as one."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from nemo_rl_core.environments.interfaces import Scorer, checked, raise_first
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout


class WeightedSumScorer(Scorer):
    """`sum_k weight_k * reward_k`; where a part fails, the rollout has no score.

    Args:
        scorers: K parts; they are closed with the sum.
        weights: K weights.
    """

    def __init__(self, scorers: Sequence[Scorer], weights: Sequence[float]) -> None:
        self._scorers = list(scorers)
        self._weights = list(weights)

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout: the sum, or the failure of the first part that fails."""
        return [
            parts if isinstance(parts, RewardError) else self._sum(parts)
            for parts in self._components(rollouts)
        ]

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts with the sum as reward and the K parts, unweighted, as components.

        Where a part has no score, the rollout has its error.
        """
        return [
            rollout.failed(parts.in_one_line)
            if isinstance(parts, RewardError)
            else replace(rollout, reward=self._sum(parts), components=parts)
            for rollout, parts in zip(rollouts, self._components(rollouts), strict=True)
        ]

    def close(self) -> None:
        """Closes every part, also when one of them fails to."""
        with ExitStack() as stack:
            for scorer in self._scorers:
                stack.callback(scorer.close)

    def _components(self, rollouts: Sequence[Rollout]) -> list[tuple[float, ...] | RewardError]:
        columns = [scorer.score(rollouts) for scorer in self._scorers]
        rows = map(_all_or_first_failure, zip(*columns, strict=True))
        return [self._whole(parts, each) for parts, each in zip(rows, rollouts, strict=True)]

    def _whole(
        self, parts: tuple[float, ...] | RewardError, rollout: Rollout
    ) -> tuple[float, ...] | RewardError:
        """The parts, if their sum is a reward."""
        if isinstance(parts, RewardError):
            return parts
        total = checked(
            self._sum(parts),
            prompt=rollout.prompt.text,
            completion=rollout.text,
            source="the weighted sum",
        )
        return total if isinstance(total, RewardError) else parts

    def _sum(self, parts: tuple[float, ...]) -> float:
        return sum(w * part for w, part in zip(self._weights, parts, strict=True))


def _all_or_first_failure(
    outcomes: tuple[float | RewardError, ...],
) -> tuple[float, ...] | RewardError:
    try:
        return tuple(raise_first(outcomes))
    except RewardError as error:
        return error
