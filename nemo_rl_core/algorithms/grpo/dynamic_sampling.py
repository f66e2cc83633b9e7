"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): the draws of one step.

It knows no engine. So the draws may be made while the step waits for them, or while earlier steps
are trained; the step is the same.
"""

from collections.abc import Sequence

import torch

from nemo_rl_core.algorithms.grpo.advantage_config import GDPO, AdvantageConfig
from nemo_rl_core.algorithms.grpo.config import DynamicSampling
from nemo_rl_core.algorithms.grpo.data import grpo_batch
from nemo_rl_core.functional.advantages import informative_groups, zero_variance_fraction
from nemo_rl_core.rollouts.batch import (
    failed_rollouts,
    failure_metrics,
    groups_of,
    joined,
    reward_metrics,
    rewards_of,
    selected,
    valid_rollouts,
)
from nemo_rl_core.types import Rollout


class StepDraws:
    """The scored draws of a step, and the groups of them that are trained on.

    Groups whose rewards are all equal are replaced by groups of a further draw. Surplus groups are
    dropped, so that no completion serves a later step, whose weights are newer.

    Args:
        sampling: Has the bound on draws; None makes one, all of which is trained on.
        advantage: Says which rewards are compared.
        num_prompts: P, the groups that the step wants.

    Example:
        With two prompts a step and four completions each, a first draw with the rewards 1, 1, 1, 1
        and 1, 0, 0, 0 has one informative group; the step wants another draw. If that has two, the
        step trains on the second group of the first draw and the first of the second.
    """

    def __init__(
        self, sampling: DynamicSampling | None, advantage: AdvantageConfig, *, num_prompts: int
    ) -> None:
        self._max_draws = sampling.max_draws if sampling else 1
        self._takes_all = sampling is None
        self._advantage = advantage
        self._num_prompts = num_prompts
        self._drawn: list[Sequence[Rollout]] = []
        self._kept: list[Sequence[Rollout]] = []

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Takes the next draw.

        Args:
            rollouts: Scored; some may have an error. Their groups are in no other draw.
        """
        self._drawn.append(rollouts)
        if not self._takes_all:
            self._kept.append(self._informative(rollouts))

    @property
    def num_draws(self) -> int:
        """Draws so far."""
        return len(self._drawn)

    @property
    def wants_more(self) -> bool:
        """Whether groups are missing, and the bound allows a further draw."""
        return self.num_draws < self._max_draws and len(self._groups()) < self._num_prompts

    def rollouts(self) -> Sequence[Rollout]:
        """What the step trains on and, behind it, what could not be scored.

        If no group is informative, it is the first draw as it is.
        """
        wanted = self._groups()[: self._num_prompts]
        if not wanted:
            return self._drawn[0]
        kept = joined(self._kept)
        chosen = selected(kept, torch.isin(groups_of(kept), torch.tensor(wanted)))
        return joined([chosen, failed_rollouts(joined(self._drawn))])

    def metrics(self) -> dict[str, float]:
        """Of all that was drawn and, where that varies, how often."""
        metrics = _sampling_metrics(joined(self._drawn))
        return metrics if self._takes_all else metrics | {"num_draws": float(self.num_draws)}

    def _groups(self) -> list[int]:
        """The ids of informative groups in the order in which they were drawn."""
        return list(
            dict.fromkeys(group for kept in self._kept for group in groups_of(kept).tolist())
        )

    def _informative(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        rollouts = valid_rollouts(rollouts)
        data = grpo_batch(rollouts)
        rewards = data["rewards"][:, None]
        if isinstance(self._advantage, GDPO):
            # GDPO normalizes each reward separately: sums may be equal for unequal rewards.
            rewards = data.get("reward_components", rewards)
        masks = [informative_groups(part, data["group_ids"]) for part in rewards.unbind(dim=1)]
        return selected(rollouts, torch.stack(masks).any(dim=0))


def _sampling_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of all sampled rollouts, including those that dynamic sampling drops."""
    valid = valid_rollouts(rollouts)
    rewards = rewards_of(valid)
    return {
        **reward_metrics(rewards),
        "zero_variance_fraction": float(zero_variance_fraction(rewards, groups_of(valid))),
        **failure_metrics(rollouts),
    }
