"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): the draws of one step.

Draws may be made while the step waits for them, or while earlier steps are trained; the step is the
same.
"""

from collections.abc import Sequence

import numpy as np
import torch

from nemo_rl_core.algorithms.grpo.advantage_config import GDPO, AdvantageConfig
from nemo_rl_core.algorithms.grpo.config import DynamicSampling, credits_turns
from nemo_rl_core.algorithms.grpo.data import grpo_batch
from nemo_rl_core.config.functions import CustomAdvantage
from nemo_rl_core.functional.advantages import informative_groups, zero_variance_fraction
from nemo_rl_core.rollouts.batch import (
    failed_rollouts,
    failure_metrics,
    reward_metrics,
    rewards_of,
    selected,
    turn_returns,
    valid_rollouts,
)
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.types import Rollout


class StepDraws:
    """Scored draws of a step, and the groups that are trained on.

    Groups whose rewards are all equal are replaced by groups of a further draw. Surplus groups are
    dropped, so that no completion serves a later step, whose weights are newer.

    Args:
        sampling: Config with the limit of draws; None makes a single draw and trains on all of it.
        advantage: Advantage, which determines the rewards that are compared.
        num_prompts: Number of groups of the step, `P`.

    Example:
        With two prompts per step and four completions each, a first draw with the rewards
        1, 1, 1, 1 and 1, 0, 0, 0 has one informative group; the step needs another draw.
        If that has two, the step trains on the second group of the first draw and the first of the
        second.
    """

    def __init__(
        self, sampling: DynamicSampling | None, advantage: AdvantageConfig, *, num_prompts: int
    ) -> None:
        self._max_draws = sampling.max_draws if sampling else 1
        self._takes_all = sampling is None
        self._advantage = advantage
        self._num_prompts = num_prompts
        self._drawn: list[RemoteRollouts] = []
        self._kept: list[RemoteRollouts] = []

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Adds the next draw of scored rollouts; no other draw has the same groups."""
        self._drawn.append(RemoteRollouts.of(rollouts))
        if not self._takes_all:
            self._kept.append(self._informative(rollouts))

    @property
    def num_draws(self) -> int:
        """Number of draws so far."""
        return len(self._drawn)

    @property
    def wants_more(self) -> bool:
        """Whether groups are missing and a further draw is allowed."""
        return len(self._drawn) < self._max_draws and len(self._groups()) < self._num_prompts

    def rollouts(self) -> RemoteRollouts:
        """Returns the rollouts that the step trains on, then those that could not be scored.

        If no group is informative, this is the complete first draw.
        """
        groups = self._groups()[: self._num_prompts]
        if not groups:
            return self._drawn[0]
        kept = RemoteRollouts.joined(self._kept)
        chosen = kept.select(np.flatnonzero(np.isin(kept.group, groups)))
        failed = failed_rollouts(RemoteRollouts.joined(self._drawn))
        return RemoteRollouts.joined([chosen, failed])

    def metrics(self) -> dict[str, float]:
        """Returns metrics of all rollouts, including dropped ones, and the number of draws."""
        rollouts = RemoteRollouts.joined(self._drawn)
        valid = rollouts.valid().episodes()
        rewards, groups = rewards_of(valid), torch.from_numpy(valid.group)
        return {
            **reward_metrics(rewards),
            "zero_variance_fraction": float(zero_variance_fraction(rewards, groups)),
            **failure_metrics(rollouts),
            **({} if self._takes_all else {"num_draws": float(self.num_draws)}),
        }

    def _groups(self) -> list[int]:
        """Returns the ids of informative groups, in the order of their draws."""
        return list(dict.fromkeys(group for kept in self._kept for group in kept.group.tolist()))

    def _informative(self, rollouts: Sequence[Rollout]) -> RemoteRollouts:
        valid = valid_rollouts(rollouts)
        data = grpo_batch(valid)
        rewards = data["rewards"][:, None]
        if isinstance(self._advantage, GDPO | CustomAdvantage):
            # Each reward may be normalized separately: sums may be equal for unequal rewards.
            rewards = data.get("reward_components", rewards)
        masks = [informative_groups(part, data["group_ids"]) for part in rewards.unbind(dim=1)]
        is_informative = torch.stack(masks).any(dim=0)
        if credits_turns(self._advantage):  # sums may be equal for unequal rewards of turns
            returns, groups = turn_returns(valid), data["group_ids"]
            rows, turns = (~returns.isnan()).nonzero(as_tuple=True)
            ids = groups[rows] * returns.shape[1] + turns
            chosen = groups[rows[informative_groups(returns[rows, turns], ids)]]
            is_informative |= torch.isin(groups, chosen)
        return selected(valid, is_informative)
