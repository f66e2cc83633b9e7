"""Scored rollouts as a training batch with advantages, and as a table to read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_core.algorithms.grpo.config import (
    GDPO,
    GRPOConfig,
    OverlongFilter,
    OverlongPenalty,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from nemo_rl_core.data.collate import collate
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
from nemo_rl_core.functional.masked import masked_sequence_mean, valid_token_mask, zero_masked
from nemo_rl_core.functional.rewards import outcome_rewards, overlong_penalty
from nemo_rl_core.types import Rollout

_GROUP_ADVANTAGES = {
    "group_normalized": group_normalized,
    "group_centered": group_centered,
    "leave_one_out": leave_one_out,
}


def grpo_batch(rollouts: Sequence[Rollout], *, num_generations_per_prompt: int) -> BatchedDataDict:
    """Rollouts, group by group, as tensors.

    Args:
        rollouts: `B = P * G`, scored; those of one prompt lie next to each other.
        num_generations_per_prompt: G.

    Returns:
        What `collate` returns, and `rewards [B]`, `group_ids [B]`, `generation_logprobs [B, T-1]`
        (0 on the prompt), `truncated [B]` and, where the environment gives several rewards,
        `reward_components [B, R]`. `add_advantages` adds what else a loss reads.

    Raises:
        RewardError: If the rollouts differ in how many rewards they have.
    """
    batch = collate(
        [rollout.prompt.token_ids + rollout.completion.token_ids for rollout in rollouts],
        [
            [False] * len(rollout.prompt.token_ids) + [True] * len(rollout.completion.token_ids)
            for rollout in rollouts
        ],
    )
    logprobs = torch.zeros(batch["token_mask"].shape)
    logprobs[batch["token_mask"]] = torch.tensor(
        [value for rollout in rollouts for value in rollout.completion.logprobs]
    )
    batch.update(
        generation_logprobs=logprobs,
        rewards=torch.tensor([float(_reward(rollout)) for rollout in rollouts]),
        # The place in the step, not the prompt's text, makes a group: a prompt may be drawn twice.
        group_ids=torch.arange(len(rollouts)) // num_generations_per_prompt,
        truncated=torch.tensor([rollout.completion.truncated for rollout in rollouts]),
    )
    components = [rollout.components for rollout in rollouts]
    counts = sorted({len(values) for values in components})
    if len(counts) > 1:
        raise RewardError(
            "rollouts of one step have different numbers of rewards",
            expected="as many components for every rollout",
            got=", ".join(str(count) for count in counts),
            fix="return every component from the reward function, 0 where it does not apply",
        )
    if counts != [0]:
        batch["reward_components"] = torch.tensor(components)
    return batch


def _reward(rollout: Rollout) -> float:
    if rollout.reward is None:
        raise ValueError(f"rollout of prompt {rollout.prompt.id!r} has not been scored")
    return rollout.reward


def add_advantages(
    batch: BatchedDataDict, config: GRPOConfig, *, max_new_tokens: int
) -> BatchedDataDict:
    """The batch of a whole step with its advantages; the batch given is left as it was.

    What looks beyond a group (whitening) looks at all rows given, so this comes before the step is
    cut into optimizer steps and micro-batches.

    Args:
        batch: What `grpo_batch` returns and, with the KL penalty in the reward, `prev_logprobs`
            and `reference_logprobs`, `[B, T-1]` each.
        config: Advantage, KL penalty, and what to do with overlong completions.
        max_new_tokens: The longest that a completion can be.

    Returns:
        The columns of `batch` and `advantages [B, T-1]`, 0 at tokens that do not count; with
        `overlong: {kind: filter}` also `sample_mask`, 0 where the completion was truncated.

    Raises:
        ConfigError: If the advantage needs rewards that the environment does not give.
        ValueError: If the overlong buffer is longer than a completion can be.
    """
    sample_mask, rewards = batch["sample_mask"], batch["rewards"]
    match config.overlong:
        case OverlongPenalty(buffer_tokens=buffer_tokens, penalty=penalty):
            rewards = rewards + overlong_penalty(
                batch["token_mask"].sum(dim=-1),
                max_tokens=max_new_tokens,
                buffer_tokens=buffer_tokens,
                penalty=penalty,
            )
        case OverlongFilter():
            sample_mask = sample_mask * ~batch["truncated"]
    mask = valid_token_mask(batch["token_mask"], sample_mask)
    advantage = config.advantage
    if isinstance(advantage, ReinforcePlusPlus | ReinforcePlusPlusBaseline):
        if isinstance(advantage, ReinforcePlusPlusBaseline):
            rewards = group_centered(rewards, batch["group_ids"])
        per_token = outcome_rewards(rewards, mask) - _kl_in_reward(batch, config)
        advantages = reinforce_plus_plus(per_token, mask)
    else:
        if isinstance(advantage, GDPO):
            per_sequence = _of_components(batch, advantage, sample_mask.bool())
        else:
            rewards = rewards - _kl_in_reward(batch, config).sum(dim=-1)
            per_sequence = _GROUP_ADVANTAGES[advantage.kind](rewards, batch["group_ids"])
        advantages = zero_masked(per_sequence[:, None].expand(mask.shape), mask)
    return BatchedDataDict({**batch, "advantages": advantages, "sample_mask": sample_mask})


def _kl_in_reward(batch: BatchedDataDict, config: GRPOConfig) -> Tensor:
    """`beta * KL(prev || ref)` at each generated token, `[B, T-1]`; 0 unless configured.

    Truncated completions that the loss leaves out have theirs too: their group's mean needs it.
    """
    token_mask = batch["token_mask"].bool()
    kl = config.loss.kl
    if kl is None or kl.place == "in_loss":
        return torch.zeros(token_mask.shape)
    estimate = kl_estimate(batch["prev_logprobs"], batch["reference_logprobs"], kind=kl.kind)
    return kl.beta * zero_masked(estimate, token_mask)


def _of_components(batch: BatchedDataDict, advantage: GDPO, sample_mask: Tensor) -> Tensor:
    components = batch.get("reward_components")
    found = 0 if components is None else components.shape[1]
    if components is None or found != len(advantage.weights):
        raise ConfigError(
            "advantage 'gdpo' has a weight for each of several rewards",
            expected=f"{len(advantage.weights)} rewards a completion, one for each weight",
            got=f"{found} from the environment",
            fix="give as many weights as the environment gives rewards",
        )
    return decoupled_group_normalized(
        components, batch["group_ids"], sample_mask, weights=advantage.weights
    )


def rollout_rows(rollouts: Sequence[Rollout], batch: BatchedDataDict) -> list[dict[str, Any]]:
    """One row a rollout: prompt, completion, answer, reward, advantage, tokens and logprobs.

    The advantage is the mean over the completion's tokens.
    """
    advantages = masked_sequence_mean(batch["advantages"], batch["token_mask"].bool())
    return [
        {
            "prompt_id": rollout.prompt.id,
            "task": rollout.prompt.task,
            "prompt": rollout.prompt.text,
            "completion": rollout.text,
            "answer": rollout.prompt.answer,
            "reward": rollout.reward,
            "advantage": advantage,
            "truncated": rollout.completion.truncated,
            "prompt_ids": list(rollout.prompt.token_ids),
            "completion_ids": list(rollout.completion.token_ids),
            "logprobs": list(rollout.completion.logprobs),
        }
        for rollout, advantage in zip(rollouts, advantages.tolist(), strict=True)
    ]


def save_rollouts(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows as parquet; the same rows give the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
