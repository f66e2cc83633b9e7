"""Draws of a step, and groups of scored rollouts as a training batch with advantages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_rl_core.algorithms.grpo.advantage_config import (
    GDPO,
    AdvantageConfig,
    GroupCentered,
    GroupNormalized,
    LeaveOneOut,
    ReinforcePlusPlusBaseline,
    WhitenedReturns,
)
from nemo_rl_core.algorithms.grpo.config import (
    DynamicSampling,
    GRPOConfig,
    OverlongFilter,
    OverlongPenalty,
    credits_turns,
)
from nemo_rl_core.config.functions import CustomAdvantage
from nemo_rl_core.config.kl import KLInReward
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.functional.advantages import (
    Moments,
    decoupled_group_normalized,
    group_centered,
    group_normalized,
    informative_groups,
    leave_one_out,
    reinforce_plus_plus,
    zero_variance_fraction,
)
from nemo_rl_core.functional.custom_advantage import OF_SEQUENCES, OF_TOKENS, AdvantageFunction
from nemo_rl_core.functional.kl import kl_estimate
from nemo_rl_core.functional.masked import valid_token_mask, zero_masked
from nemo_rl_core.functional.rewards import outcome_rewards, overlong_penalty, returns_to_go
from nemo_rl_core.rollouts.batch import (
    episodes_of,
    failure_metrics,
    groups_of,
    reward_metrics,
    rewards_of,
    rollout_batch,
    turn_returns,
)
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.types import Rollout


@dataclass
class StepDraws:
    """Scored draws of a step, and the groups that are trained on (dynamic sampling).

    Groups whose rewards are all equal are replaced by groups of a further draw. Surplus groups are
    dropped, so that no completion serves a later step, whose weights are newer. Draws may be made
    while the step waits for them, or while earlier steps are trained; the step is the same. Source:
    DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2.

    Attributes:
        sampling: Config with the limit of draws; None makes a single draw and trains on all of it.
        advantage: Advantage, which determines the rewards that are compared.
        num_prompts: Number of groups of the step, `P`.

    Example:
        With two prompts per step and four completions each, a first draw with the rewards
        1, 1, 1, 1 and 1, 0, 0, 0 has one informative group; the step needs another draw.
        If that has two, the step trains on the second group of the first draw and the first of the
        second.
    """

    sampling: DynamicSampling | None
    advantage: AdvantageConfig
    num_prompts: int = field(kw_only=True)
    _drawn: list[RemoteRollouts] = field(default_factory=list, init=False)
    _kept: list[RemoteRollouts] = field(default_factory=list, init=False)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Adds the next draw of scored rollouts; no other draw has the same groups."""
        self._drawn.append(RemoteRollouts.of(rollouts))
        if self.sampling is not None:
            self._kept.append(self._informative(self._drawn[-1]))

    @property
    def num_draws(self) -> int:
        """Number of draws so far."""
        return len(self._drawn)

    @property
    def wants_more(self) -> bool:
        """Whether groups are missing and a further draw is allowed."""
        if self.sampling is None or len(self._drawn) >= self.sampling.max_draws:
            return False
        return len(self._groups()) < self.num_prompts

    def rollouts(self) -> RemoteRollouts:
        """Returns the rollouts that the step trains on, then those that could not be scored.

        If no group is informative, this is the complete first draw.
        """
        groups = self._groups()[: self.num_prompts] if self._kept else []
        if not groups:
            return self._drawn[0]
        kept = RemoteRollouts.joined(self._kept)
        chosen = kept.select(np.flatnonzero(np.isin(kept.group, groups)))
        drawn = RemoteRollouts.joined(self._drawn)
        failed = drawn.select(np.flatnonzero(~drawn.is_valid))
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
            **({"num_draws": float(self.num_draws)} if self.sampling else {}),
        }

    def _groups(self) -> list[int]:
        """Returns the ids of informative groups, in the order of their draws."""
        return list(dict.fromkeys(group for kept in self._kept for group in kept.group.tolist()))

    def _informative(self, rollouts: RemoteRollouts) -> RemoteRollouts:
        valid = rollouts.valid()
        data = grpo_batch(valid)
        rewards = data["rewards"][:, None]
        if isinstance(self.advantage, GDPO | CustomAdvantage):
            # Each reward may be normalized separately: sums may be equal for unequal rewards.
            rewards = data.get("reward_components", rewards)
        masks = [informative_groups(part, data["group_ids"]) for part in rewards.unbind(dim=1)]
        is_informative = torch.stack(masks).any(dim=0)
        if credits_turns(self.advantage):  # sums may be equal for unequal rewards of turns
            returns, groups = turn_returns(valid), data["group_ids"]
            rows, turns = (~returns.isnan()).nonzero(as_tuple=True)
            ids = groups[rows] * returns.shape[1] + turns
            chosen = groups[rows[informative_groups(returns[rows, turns], ids)]]
            is_informative |= torch.isin(groups, chosen)
        return valid.select(is_informative.nonzero()[:, 0].numpy())


def grpo_batch(rollouts: Sequence[Rollout]) -> BatchedDataDict:
    """Returns the columns of `rollout_batch`, and `group_ids [B]`; groups may differ in size."""
    batch = rollout_batch(rollouts)
    # Groups are formed by index in the step, not by prompt, since a prompt may be sampled twice.
    batch["group_ids"] = groups_of(rollouts)
    return batch


def scores_of_step(config: GRPOConfig, *, is_current: bool) -> dict[str, str]:
    """Returns the policy's methods for the logprobs that a step reads, by column.

    If `is_current`, `prev_logprobs` come from the training step's own forward pass.
    """
    scores = {} if is_current else {"prev_logprobs": "get_logprobs"}
    if config.loss.kl or getattr(config.loss, "needs_reference", False):
        scores["reference_logprobs"] = "get_reference_logprobs"
    return scores


def figures_of_step(config: GRPOConfig) -> dict[str, Callable[[BatchedDataDict], Any]]:
    """Returns the functions, by name, that each rank applies to its rows to compute advantages."""
    if isinstance(config.advantage, WhitenedReturns):
        return {"moments": partial(returns_moments, config=config)}
    return {"kl_penalties": partial(kl_penalties, config=config)} if config.has_kl_in_reward else {}


def whitening(
    moments: Sequence[Moments], config: GRPOConfig
) -> Callable[[BatchedDataDict], dict[str, Tensor]]:
    """Returns `token_advantages` of the full step, given `returns_moments` of each rank."""
    return partial(token_advantages, config=config, moments=Moments.joined(moments))


def add_advantages(
    batch: BatchedDataDict,
    config: GRPOConfig,
    advantage_fn: AdvantageFunction | None = None,
) -> BatchedDataDict:
    """Adds advantages to a copy of the batch of a full step.

    Whitening uses all rows, so call this before splitting the step into optimizer steps and
    micro-batches. With remote tokens, the controller calls this only for advantages that differ by
    sequence; ranks compute `returns_moments` and `token_advantages`.

    Args:
        batch: From `with_outcomes` and, with the KL penalty in the reward, `prev_logprobs` and
            `reference_logprobs`, `[B, T-1]` each, or `kl_penalties [B]` instead.
        config: Advantage, KL penalty, and handling of overlong completions.
        advantage_fn: The custom advantage that the config names, if any.

    Returns:
        The batch with `advantages [B, T-1]`, 0 at masked tokens, or `[B]` if the tokens are remote.
        With remote tokens and credit by turn, `turn_advantages [B, K]` for `spread_over_turns`.
    """
    with_advantages = batch.copy()
    if isinstance(config.advantage, WhitenedReturns):
        with_advantages.update(token_advantages(batch, config, returns_moments(batch, config)))
        return with_advantages
    mask = None
    if not batch.is_remote:
        if isinstance(config.loss.kl, KLInReward):
            with_advantages["kl_penalties"] = kl_penalties(with_advantages, config)
        mask = valid_token_mask(with_advantages["token_mask"], with_advantages["sample_mask"])
    episodes, index = episodes_of(with_advantages)
    rewards = episodes["outcomes"]
    if "kl_penalties" in episodes:
        rewards = rewards - episodes["kl_penalties"]
    if "turn_returns" in batch:
        turns = _turn_advantages(with_advantages, config.advantage, rewards[index])
        with_advantages["turn_advantages"] = turns
        if mask is not None:
            with_advantages.update(spread_over_turns(with_advantages))
        return with_advantages
    if advantage_fn is not None:
        is_by_token = advantage_fn.reads_tokens and episodes is with_advantages
        of_tokens = mask if is_by_token else None
        advantages = advantage_fn.of_group(_columns(episodes, rewards), mask=of_tokens)
    elif isinstance(config.advantage, GDPO):
        kept = episodes["sample_mask"].bool()
        advantages = _gdpo_advantages(episodes, config.advantage, kept)
    else:
        outcomes, group_ids = episodes["outcomes"], episodes["group_ids"]
        advantages = _compared(config.advantage, rewards, group_ids, outcomes)
    advantages = advantages[index]
    if mask is not None and advantages.dim() == 1:
        advantages = zero_masked(advantages[:, None].expand(mask.shape), mask)
    with_advantages["advantages"] = advantages
    return with_advantages


def with_outcomes(
    batch: BatchedDataDict, config: GRPOConfig, *, max_new_tokens: int
) -> BatchedDataDict:
    """Returns a copy of the batch of a full step with the outcome of each sequence.

    `outcomes [B]` are the rewards less the penalty of overlong completions and, in
    `reinforce_plus_plus_baseline`, the group's mean. With `overlong: {kind: filter}`, `sample_mask`
    is 0 where the episode's last turn was truncated. Tokens of `grpo_batch` may be remote.

    Args:
        max_new_tokens: Maximum length of a rollout after its prompt, all turns included.
    """
    episodes, index = episodes_of(batch)
    rewards = episodes["rewards"]
    if isinstance(config.overlong, OverlongPenalty):
        rewards = rewards + overlong_penalty(
            episodes["rollout_lengths"],
            max_tokens=max_new_tokens,
            buffer_tokens=config.overlong.buffer_tokens,
            penalty=config.overlong.penalty,
        )
    if isinstance(config.advantage, ReinforcePlusPlusBaseline):
        rewards = group_centered(rewards, episodes["group_ids"])
    mask = batch["sample_mask"]
    if isinstance(config.overlong, OverlongFilter):
        mask = mask * ~episodes["truncated"][index]
    return BatchedDataDict({**batch, "outcomes": rewards[index], "sample_mask": mask})


def spread_over_turns(batch: BatchedDataDict) -> dict[str, Tensor]:
    """Returns the column `advantages [B, T-1]` of any rows of a step, given `turn_advantages`.

    The tokens of a turn are a run of the policy's tokens, which those of the environment end.

    Raises:
        RewardError: If a row has another number of runs than of rewarded turns.
    """
    mask, turns = batch["token_mask"].bool(), batch["turn_advantages"]
    if not mask.numel():  # a rank may have no rows
        return {"advantages": torch.zeros(mask.shape)}
    is_first, is_turn = mask & ~torch.nn.functional.pad(mask, (1, -1)), ~turns.isnan()
    if not torch.equal(is_first.sum(dim=1), is_turn.sum(dim=1)):
        raise RewardError(
            "advantage.credit 'turn' cannot tell the turns of a rollout from their tokens",
            expected="at least one token of the policy in each turn, and one of the environment "
            "between two turns",
            got=f"{int(is_first.sum())} runs of the policy's tokens, {int(is_turn.sum())} rewards",
            fix="have the environment reward each turn and answer with text, or leave credit out",
        )
    number = is_turn.int().argmax(dim=1, keepdim=True) + is_first.cumsum(dim=1) - 1
    values = turns.gather(1, number.clamp(0, turns.shape[1] - 1))
    return {"advantages": zero_masked(values, valid_token_mask(mask, batch["sample_mask"]))}


def returns_moments(batch: BatchedDataDict, config: GRPOConfig) -> Moments:
    """Computes the moments of the returns of all trained tokens, which must be local."""
    rewards, mask = _token_rewards(batch, config)
    return Moments.of(returns_to_go(rewards, mask), mask)


def token_advantages(
    batch: BatchedDataDict, config: GRPOConfig, moments: Moments
) -> dict[str, Tensor]:
    """Returns the column `advantages [B, T-1]`, whitened by the moments of the full step."""
    rewards, mask = _token_rewards(batch, config)
    return {"advantages": reinforce_plus_plus(rewards, mask, moments)}


def _token_rewards(batch: BatchedDataDict, config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """Returns `[B, T-1]` rewards, with the outcome at the last token, and the mask of tokens."""
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    return outcome_rewards(batch["outcomes"], mask) - _kl_in_reward(batch, config), mask


def kl_penalties(batch: BatchedDataDict, config: GRPOConfig) -> Tensor:
    """Returns `[B]`, the KL penalty of each sequence's reward."""
    return _kl_in_reward(batch, config).sum(dim=-1)


def _columns(batch: BatchedDataDict, rewards: Tensor) -> dict[str, Any]:
    """Returns the columns that a custom advantage may read."""
    # The tokens of an episode with several training samples are not in one row.
    names = OF_SEQUENCES if "episode_ids" in batch else (*OF_SEQUENCES, *OF_TOKENS)
    columns = {name: batch[name] for name in names if name in batch}
    return {**columns, "rewards": rewards, "groups": batch["group_ids"]}


def _turn_advantages(batch: BatchedDataDict, advantage: AdvantageConfig, rewards: Tensor) -> Tensor:
    """Returns `[B, K]` advantages of turns, each compared with the same turn of its group.

    Penalties of the episode lower the returns of all of its turns. NaN where `turn_returns` are.
    """
    returns, penalties = batch["turn_returns"], rewards - batch["outcomes"]
    shaped = returns + (batch["outcomes"] - batch["rewards"])[:, None]
    rows, turns = (~returns.isnan()).nonzero(as_tuple=True)
    groups, outcomes = batch["group_ids"][rows] * returns.shape[1] + turns, shaped[rows, turns]
    advantages: Tensor = returns.clone()
    advantages[rows, turns] = _compared(advantage, outcomes + penalties[rows], groups, outcomes)
    return advantages


def _compared(
    advantage: AdvantageConfig, rewards: Tensor, group_ids: Tensor, outcomes: Tensor
) -> Tensor:
    match advantage:
        case GroupNormalized():
            return group_normalized(rewards, group_ids, outcomes=outcomes)
        case GroupCentered():
            return group_centered(rewards, group_ids)
        case LeaveOneOut():
            return leave_one_out(rewards, group_ids)
        case _:
            raise AssertionError("other advantages differ by token, or are a function")


def _kl_in_reward(batch: BatchedDataDict, config: GRPOConfig) -> Tensor:
    """`beta * KL(prev || ref)` at each generated token, `[B, T-1]`; 0 unless configured.

    Also at truncated completions that the loss leaves out, since their group's mean needs it.
    """
    token_mask = batch["token_mask"].bool()
    kl = config.loss.kl
    if not isinstance(kl, KLInReward):
        return torch.zeros(token_mask.shape)
    estimate = kl_estimate(batch["prev_logprobs"], batch["reference_logprobs"], kind=kl.kind)
    return kl.beta * zero_masked(estimate, token_mask)


def _gdpo_advantages(batch: BatchedDataDict, advantage: GDPO, sample_mask: Tensor) -> Tensor:
    components = batch.get("reward_components")
    num_components = 0 if components is None else components.shape[1]
    if components is None or num_components != len(advantage.weights):
        raise ConfigError(
            "advantage 'gdpo' has a weight for each of several rewards",
            expected=f"{len(advantage.weights)} rewards per completion, one for each weight",
            got=f"{num_components} from the environment",
            fix="give as many weights as the environment returns rewards",
        )
    if components.isnan().any():
        raise RewardError(
            "advantage 'gdpo' compares each reward within its group, and one of them is missing",
            expected="a number from each reward function for each completion",
            got="None, for a completion that the function does not apply to",
            fix="return 0.0 instead of None, or choose another advantage",
        )
    return decoupled_group_normalized(
        components, batch["group_ids"], sample_mask, weights=advantage.weights
    )
