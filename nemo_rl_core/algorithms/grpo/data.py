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
from nemo_rl_core.config.kl import KLInReward
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.functional.advantages import (
    Moments,
    decoupled_group_normalized,
    group_centered,
    group_normalized,
    leave_one_out,
    reinforce_plus_plus,
)
from nemo_rl_core.functional.kl import kl_estimate
from nemo_rl_core.functional.masked import valid_token_mask, zero_masked
from nemo_rl_core.functional.rewards import outcome_rewards, overlong_penalty, returns_to_go
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


def differs_by_token(config: GRPOConfig) -> bool:
    """Whether advantages are whitened returns of tokens, and not one number a sequence."""
    return isinstance(config.advantage, ReinforcePlusPlus | ReinforcePlusPlusBaseline)


def trained_mask(batch: BatchedDataDict, config: GRPOConfig) -> Tensor:
    """`sample_mask [B]`, 0 also where a completion is left out because it was truncated."""
    mask: Tensor = batch["sample_mask"]
    return mask * ~batch["truncated"] if isinstance(config.overlong, OverlongFilter) else mask


def add_advantages(
    batch: BatchedDataDict, config: GRPOConfig, *, max_new_tokens: int
) -> BatchedDataDict:
    """Adds advantages to a copy of the batch of a whole step.

    Whitening uses all rows, so call this before splitting the step into optimizer steps and
    micro-batches. Of tokens that lie elsewhere, this is what remains to the controller, if
    advantages differ by sequence alone: ranks compute `returns_moments` and `token_advantages`.

    Args:
        batch: From `grpo_batch` and, with the KL penalty in the reward, `prev_logprobs` and
            `reference_logprobs`, `[B, T-1]` each, or in their place `kl_penalties [B]`.
        config: Advantage, KL penalty, and handling of overlong completions.
        max_new_tokens: Maximum length of a rollout after its prompt, all turns included.

    Returns:
        The columns of `with_outcomes` and `advantages [B, T-1]`, 0 at masked tokens, or `[B]` where
        the tokens are held elsewhere.

    Raises:
        ConfigError: If the advantage needs rewards that the environment does not return.
        ValueError: If the overlong buffer is longer than a completion can be.
    """
    found = with_outcomes(batch, config, max_new_tokens=max_new_tokens)
    if differs_by_token(config):
        found.update(token_advantages(found, config, returns_moments(found, config)))
    elif batch.is_held:
        found["advantages"] = _of_sequences(found, config)
    else:
        if config.has_kl_in_reward:
            found["kl_penalties"] = kl_penalties(found, config)
        mask = valid_token_mask(found["token_mask"], found["sample_mask"])
        of_sequences = _of_sequences(found, config)
        found["advantages"] = zero_masked(of_sequences[:, None].expand(mask.shape), mask)
    return found


def with_outcomes(
    batch: BatchedDataDict, config: GRPOConfig, *, max_new_tokens: int
) -> BatchedDataDict:
    """A copy of the batch of a whole step with what advantages need of each sequence.

    Args:
        batch: From `grpo_batch`; tokens may lie elsewhere.
        config: Advantage and handling of overlong completions.
        max_new_tokens: As `add_advantages` takes it.

    Returns:
        The columns of `batch` and `outcomes [B]`, the rewards less the penalty of overlong
        completions and, in `reinforce_plus_plus_baseline`, the group's mean; with
        `overlong: {kind: filter}` also `sample_mask`, 0 where the completion was truncated.

    Raises:
        ValueError: If the overlong buffer is longer than a completion can be.
    """
    rewards = batch["rewards"]
    if isinstance(config.overlong, OverlongPenalty):
        rewards = rewards + overlong_penalty(
            batch["rollout_lengths"],
            max_tokens=max_new_tokens,
            buffer_tokens=config.overlong.buffer_tokens,
            penalty=config.overlong.penalty,
        )
    if isinstance(config.advantage, ReinforcePlusPlusBaseline):
        rewards = group_centered(rewards, batch["group_ids"])
    columns = {"outcomes": rewards, "sample_mask": trained_mask(batch, config)}
    return BatchedDataDict({**batch, **columns})


def returns_moments(batch: BatchedDataDict, config: GRPOConfig) -> Moments:
    """Of the returns of all tokens that are trained on.

    Args:
        batch: Any rows of `with_outcomes`, with their tokens and, with the KL penalty in the
            reward, `prev_logprobs` and `reference_logprobs`.
        config: With an advantage that differs by token.
    """
    rewards, mask = _token_rewards(batch, config)
    return Moments.of(returns_to_go(rewards, mask), mask)


def token_advantages(
    batch: BatchedDataDict, config: GRPOConfig, moments: Moments
) -> dict[str, Tensor]:
    """The column `advantages [B, T-1]` of those that differ by token, 0 at masked ones.

    Args:
        batch: As `returns_moments` takes it.
        config: With an advantage that differs by token.
        moments: Of the whole step.
    """
    rewards, mask = _token_rewards(batch, config)
    return {"advantages": reinforce_plus_plus(rewards, mask, moments)}


def _token_rewards(batch: BatchedDataDict, config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """`[B, T-1]` rewards, the outcome's at the last token, and the mask of trained tokens."""
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    return outcome_rewards(batch["outcomes"], mask) - _kl_in_reward(batch, config), mask


def kl_penalties(batch: BatchedDataDict, config: GRPOConfig) -> Tensor:
    """`[B]`: what the KL to the reference takes off each sequence's reward."""
    return _kl_in_reward(batch, config).sum(dim=-1)


def _of_sequences(batch: BatchedDataDict, config: GRPOConfig) -> Tensor:
    """`[B]` advantages that all tokens of a sequence share.

    Args:
        batch: From `with_outcomes`; with the KL penalty in the reward also `kl_penalties [B]`.
        config: The advantage, of another kind than those that differ by token.
    """
    advantage, outcomes = config.advantage, batch["outcomes"]
    if isinstance(advantage, GDPO):
        return _of_components(batch, advantage, batch["sample_mask"].bool())
    assert not isinstance(advantage, ReinforcePlusPlus | ReinforcePlusPlusBaseline)
    lowered = outcomes - batch["kl_penalties"] if config.has_kl_in_reward else outcomes
    return _of_groups(lowered, batch["group_ids"], advantage, outcomes=outcomes)


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
