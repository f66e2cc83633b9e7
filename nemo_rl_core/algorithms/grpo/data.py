"""Groups of scored rollouts as a training batch with advantages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_rl_core.algorithms.grpo.advantage_config import (
    GDPO,
    GroupCentered,
    GroupNormalized,
    LeaveOneOut,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from nemo_rl_core.algorithms.grpo.config import GRPOConfig, OverlongFilter, OverlongPenalty
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.functional.advantages import (
    decoupled_group_normalized,
    group_centered,
    group_normalized,
    leave_one_out,
    reinforce_plus_plus,
)
from nemo_rl_core.functional.kl import kl_estimate
from nemo_rl_core.functional.masked import valid_token_mask, zero_masked
from nemo_rl_core.functional.rewards import outcome_rewards, overlong_penalty
from nemo_rl_core.rollouts.batch import groups_of, rollout_batch
from nemo_rl_core.types import Rollout


def grpo_batch(rollouts: Sequence[Rollout]) -> BatchedDataDict:
    """Builds a batch of rollouts with group ids.

    Args:
        rollouts: `B` scored rollouts; groups may differ in size.

    Returns:
        The columns of `rollout_batch`, and `group_ids [B]`. `add_advantages` adds the others.
    """
    batch = rollout_batch(rollouts)
    # Groups are formed by index in the step, not by prompt, since a prompt may be sampled twice.
    batch["group_ids"] = groups_of(rollouts)
    return batch


def reads_tokens(config: GRPOConfig) -> bool:
    """Whether advantages are computed from values a token, and not from rewards alone."""
    by_token = isinstance(config.advantage, ReinforcePlusPlus | ReinforcePlusPlusBaseline)
    return by_token or config.has_kl_in_reward


def trained_mask(batch: BatchedDataDict, config: GRPOConfig) -> Tensor:
    """`sample_mask [B]`, 0 also where a completion is left out because it was truncated."""
    mask: Tensor = batch["sample_mask"]
    return mask * ~batch["truncated"] if isinstance(config.overlong, OverlongFilter) else mask


def add_advantages(
    batch: BatchedDataDict, config: GRPOConfig, *, max_new_tokens: int
) -> BatchedDataDict:
    """Adds advantages to a copy of the batch of a whole step.

    Whitening uses all rows, so call this before splitting the step into optimizer steps and
    micro-batches.

    Args:
        batch: From `grpo_batch` and, with the KL penalty in the reward, `prev_logprobs` and
            `reference_logprobs`, `[B, T-1]` each.
        config: Advantage, KL penalty, and handling of overlong completions.
        max_new_tokens: Maximum length of a rollout after its prompt, all turns included.

    Returns:
        The columns of `batch` and `advantages [B, T-1]`, 0 at masked tokens, or `[B]` where the
        tokens are held elsewhere; with `overlong: {kind: filter}` also `sample_mask`, 0 where the
        completion was truncated.

    Raises:
        ConfigError: If the advantage needs rewards that the environment does not return.
        ValueError: If the overlong buffer is longer than a completion can be.
    """
    sample_mask, rewards = trained_mask(batch, config), batch["rewards"]
    if isinstance(config.overlong, OverlongPenalty):
        rewards = rewards + overlong_penalty(
            batch["rollout_lengths"],
            max_tokens=max_new_tokens,
            buffer_tokens=config.overlong.buffer_tokens,
            penalty=config.overlong.penalty,
        )
    if batch.is_held:
        assert not reads_tokens(config)  # such rollouts are not held
        advantages = _of_sequences(batch, config, rewards, rewards, sample_mask)
        return BatchedDataDict({**batch, "advantages": advantages, "sample_mask": sample_mask})
    mask = valid_token_mask(batch["token_mask"], sample_mask)
    if isinstance(config.advantage, ReinforcePlusPlus | ReinforcePlusPlusBaseline):
        if isinstance(config.advantage, ReinforcePlusPlusBaseline):
            rewards = group_centered(rewards, batch["group_ids"])
        per_token = outcome_rewards(rewards, mask) - _kl_in_reward(batch, config)
        advantages = reinforce_plus_plus(per_token, mask)
    else:
        lowered = rewards - _kl_in_reward(batch, config).sum(dim=-1)
        per_sequence = _of_sequences(batch, config, rewards, lowered, sample_mask)
        advantages = zero_masked(per_sequence[:, None].expand(mask.shape), mask)
    return BatchedDataDict({**batch, "advantages": advantages, "sample_mask": sample_mask})


def _of_sequences(
    batch: BatchedDataDict,
    config: GRPOConfig,
    outcomes: Tensor,
    lowered: Tensor,
    sample_mask: Tensor,
) -> Tensor:
    """`[B]` advantages that all tokens of a sequence share.

    Args:
        batch: From `grpo_batch`.
        config: The advantage, of another kind than those with advantages a token.
        outcomes: `[B]` rewards.
        lowered: `[B]`, the same less the penalty for the KL.
        sample_mask: `[B]`.
    """
    advantage = config.advantage
    if isinstance(advantage, GDPO):
        return _of_components(batch, advantage, sample_mask.bool())
    assert not isinstance(advantage, ReinforcePlusPlus | ReinforcePlusPlusBaseline)
    return _of_groups(lowered, batch["group_ids"], advantage, outcomes=outcomes)


def _kl_in_reward(batch: BatchedDataDict, config: GRPOConfig) -> Tensor:
    """`beta * KL(prev || ref)` at each generated token, `[B, T-1]`; 0 unless configured.

    Also at truncated completions that the loss leaves out, since their group's mean needs it.
    """
    token_mask = batch["token_mask"].bool()
    kl = config.loss.kl
    if kl is None or kl.place == "in_loss":
        return torch.zeros(token_mask.shape)
    estimate = kl_estimate(batch["prev_logprobs"], batch["reference_logprobs"], kind=kl.kind)
    return kl.beta * zero_masked(estimate, token_mask)


def _of_groups(
    rewards: Tensor,
    group_ids: Tensor,
    advantage: GroupNormalized | GroupCentered | LeaveOneOut,
    *,
    outcomes: Tensor,
) -> Tensor:
    match advantage:
        case GroupNormalized():
            return group_normalized(rewards, group_ids, outcomes=outcomes)
        case GroupCentered():
            return group_centered(rewards, group_ids)
        case LeaveOneOut():
            return leave_one_out(rewards, group_ids)


def _of_components(batch: BatchedDataDict, advantage: GDPO, sample_mask: Tensor) -> Tensor:
    components = batch.get("reward_components")
    found = 0 if components is None else components.shape[1]
    if components is None or found != len(advantage.weights):
        raise ConfigError(
            "advantage 'gdpo' has a weight for each of several rewards",
            expected=f"{len(advantage.weights)} rewards per completion, one for each weight",
            got=f"{found} from the environment",
            fix="give as many weights as the environment returns rewards",
        )
    if components.isnan().any():
        raise RewardError(
            "advantage 'gdpo' compares each reward within its group, and one of them is missing",
            expected="a number from each reward function for each completion",
            got="None, for a completion that the function does not apply to",
            fix="return 0.0 in place of None, or choose another advantage",
        )
    return decoupled_group_normalized(
        components, batch["group_ids"], sample_mask, weights=advantage.weights
    )
