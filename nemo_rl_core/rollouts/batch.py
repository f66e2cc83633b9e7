"""Scored rollouts as a training batch, and its metrics.

Rollouts that could not be scored are left out and counted, never given a low reward.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from nemo_rl_core.distributed.batched_data_dict import (
    BatchedDataDict,
    InProcess,
    RemoteRows,
    as_block,
)
from nemo_rl_core.environments.interfaces import shorten
from nemo_rl_core.errors import RewardError
from nemo_rl_core.functional.kl import kl_generation_trainer
from nemo_rl_core.functional.masked import masked_sequence_mean, valid_token_mask, zero_masked
from nemo_rl_core.functional.policy_gradient import sampling_importance_ratio
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.rollouts.remote_rollouts import CompletionSource, RemoteRollouts
from nemo_rl_core.types import Rollout


def rollout_batch(rollouts: Sequence[Rollout]) -> BatchedDataDict:
    """Converts scored rollouts to a batch that trains on the policy's tokens.

    Returns:
        `tokens [B]`, whose values are remote: `input_ids`, `token_mask`, `generation_logprobs` and,
        in asynchronous training, `weight_versions`, as in `RemoteCompletions.tokens`, with 0 at
        tokens that the policy did not generate. Local columns: `input_lengths [B]`;
        `sample_mask [B]`; `rewards [B]`; `truncated [B]`; `rollout_lengths [B]`, the number of
        tokens after the prompt, including those of the environment; `num_turns [B]` and
        `written_lengths [B]`, the number of the policy's tokens, if an environment answered; and
        `reward_components [B, R]` if it returned several rewards. Rollouts of this process have
        local columns instead of `tokens`. If an episode has several training samples, there are
        also the columns of `_episode_columns`.

    Raises:
        RewardError: If the rollouts differ in how many rewards they have, one could not be scored,
            or samples of one episode have different rewards.
    """
    columns = RemoteRollouts.of(rollouts)
    source = columns.source.completions
    batch = BatchedDataDict(
        {
            "tokens": source.tokens[columns.completion],
            "input_lengths": torch.from_numpy(source.input_lengths[columns.completion]),
            "sample_mask": torch.ones(len(columns)),
            "truncated": torch.from_numpy(source.truncated[columns.completion]),
            "rollout_lengths": torch.from_numpy(source.completion_lengths[columns.completion]),
        }
    )
    if columns.turns:
        num_unread = [each.num_unread_tokens for each in columns.turns]
        batch["rollout_lengths"] += torch.tensor(num_unread)
        batch["written_lengths"] = torch.tensor([each.num_written for each in columns.turns])
        batch["num_turns"] = torch.tensor([len(each.rewards) for each in columns.turns])
    batch["rewards"] = rewards_of(columns)
    if any(columns.components):
        batch["reward_components"] = _reward_components(columns.components)
    if columns.part is not None:
        batch.update(_episode_columns(columns, batch))
    return batch if columns is rollouts else batch.fetched()


def _episode_columns(columns: RemoteRollouts, batch: BatchedDataDict) -> dict[str, Tensor]:
    """Returns columns of rows that may be training samples of the same episode.

    `episode_ids [B]`; `sequence_weights [B]`, the share of the episode's trained tokens, so that an
    episode counts as one sequence; and with one value per episode `num_turns` and
    `rollout_lengths`, the largest number of tokens of a sample after the prompt of the first
    sample, which `rollouts.max_rollout_tokens` limits.
    """
    episode, rewards = torch.from_numpy(columns.episode), batch["rewards"]
    for row in (rewards != rewards_of(columns.episodes())[episode]).nonzero()[:1, 0].tolist():
        raise RewardError(
            "the training samples of an episode have different rewards",
            expected="one reward per episode, the same for each of its samples",
            got=f"{float(rewards[row])} for a sample of prompt {columns.prompt_of(row).id!r}",
            fix="score the episode once",
        )
    zeros, part = torch.zeros_like(episode), torch.from_numpy(columns.part)
    num_tokens = columns.source.completions.completion_lengths[columns.completion]
    starts = batch["input_lengths"] - torch.from_numpy(num_tokens)
    lengths = batch["rollout_lengths"]
    first_starts = zeros.index_add(0, episode, torch.where(part == 0, starts, 0))[episode]
    longest = zeros.scatter_reduce(0, episode, lengths + starts - first_starts, "amax")
    written = batch.get("written_lengths", lengths)
    totals = {"written": written, "num_turns": batch.get("num_turns", torch.ones_like(written))}
    sums = {name: zeros.index_add(0, episode, each)[episode] for name, each in totals.items()}
    return {
        "episode_ids": episode,
        "sequence_weights": written / sums["written"].clamp(min=1),
        "rollout_lengths": longest[episode],
        "num_turns": sums["num_turns"],
    }


def turn_returns(rollouts: Sequence[Rollout]) -> Tensor:
    """Returns `[B, K]`, the rewards of an episode's turn k and of its later turns.

    NaN where turn k is not in the row: after the last turn, or in another training sample of the
    episode. What the environment added to the reward of the full batch belongs to the last turn.
    """
    columns = RemoteRollouts.of(rollouts)
    scores, episodes = columns.rewards, dict[int, list[tuple[int, float]]]()
    assert scores is not None
    for row, episode in enumerate(columns.episode.tolist()):
        rewards = columns.turns[row].rewards if columns.turns else ()
        episodes.setdefault(episode, []).extend((row, reward) for reward in rewards)
    returns = np.full((len(columns), max(map(len, episodes.values()), default=0)), np.nan)
    for turns in filter(None, episodes.values()):
        rows, rewards = zip(*turns, strict=True)
        left = float(scores[rows[0]]) - sum(rewards)  # exactly 0 if the reward is their sum
        from_end = list(accumulate(rewards[::-1], initial=left))
        returns[list(rows), range(len(rows))] = from_end[:0:-1]
    return torch.from_numpy(returns).float()


def episodes_of(batch: BatchedDataDict) -> tuple[BatchedDataDict, Tensor | slice]:
    """Returns the last row of each of `E` episodes, and each row's index among them.

    The index is `[B]`, or a slice of all rows if no episode has several training samples. An
    episode is masked if all its samples are, and its `kl_penalties` are the sum over them.
    """
    if "episode_ids" not in batch:
        return batch, slice(None)
    ids, index = torch.unique(batch["episode_ids"], return_inverse=True)
    rows = torch.zeros_like(ids).scatter_reduce(0, index, torch.arange(len(index)), "amax")
    episodes, zeros = batch.select_indices(rows.numpy()), torch.zeros(len(ids))
    mask = batch["sample_mask"].float()
    episodes["sample_mask"] = zeros.scatter_reduce(0, index, mask, "amax")
    if "kl_penalties" in batch:
        episodes["kl_penalties"] = zeros.index_add(0, index, batch["kl_penalties"])
    return episodes, index


def with_logprobs_of(policy: PolicyInterface, rollouts: Sequence[Rollout]) -> RemoteRollouts:
    """Replaces the engine's logprobs with those that a policy computes for the same tokens."""
    columns = RemoteRollouts.of(rollouts)
    completions = columns.source.completions
    lengths = torch.from_numpy(completions.input_lengths)
    batch = BatchedDataDict({"tokens": completions.tokens, "input_lengths": lengths}).fetched()
    batch["sample_mask"] = torch.ones(len(lengths))
    tokens = {name: batch[name] for name in batch if name not in ("input_lengths", "sample_mask")}
    logprobs = policy.get_logprobs(batch)["logprobs"]
    tokens["generation_logprobs"] = zero_masked(logprobs, tokens["token_mask"])
    block = RemoteRows.of_blocks([InProcess(as_block(tokens))], [len(lengths)])
    return replace(columns, source=CompletionSource(replace(completions, tokens=block)))


def _reward_components(components: Sequence[Sequence[float]]) -> Tensor:
    counts = sorted({len(values) for values in components})
    if len(counts) > 1:
        raise RewardError(
            "rollouts of one step have different numbers of rewards",
            expected="the same number of components for every rollout",
            got=", ".join(str(count) for count in counts),
            fix="return every component from the reward function, 0 where it does not apply",
        )
    return torch.tensor(components)


def rewards_of(rollouts: Sequence[Rollout]) -> Tensor:
    """Returns `[B]` rewards."""
    columns = RemoteRollouts.of(rollouts)
    for row, error in (columns.errors or {}).items():
        raise RewardError(
            f"a rollout of prompt {columns.prompt_of(row).id!r} that could not be scored is in the "
            "batch",
            expected="rollouts with a reward",
            got=error,
            fix="leave such rollouts out: rollout_batch(valid_rollouts(rollouts))",
        )
    rewards = np.full(len(columns), np.nan) if columns.rewards is None else columns.rewards
    for row in np.flatnonzero(np.isnan(rewards)).tolist():
        raise ValueError(f"rollout of prompt {columns.prompt_of(row).id!r} has not been scored")
    return torch.from_numpy(rewards).float()


def reward_metrics(rewards: Tensor) -> dict[str, float]:
    """Returns `reward`, the mean of `[B]` rewards, and `reward_std`, their standard deviation."""
    deviation = rewards.std(correction=min(1, len(rewards) - 1))
    return {"reward": rewards.mean().item(), "reward_std": deviation.item()}


def rollout_metrics(batch: BatchedDataDict) -> dict[str, float]:
    """Returns metrics of rewards and lengths, and of the difference between engine and trainer.

    Args:
        batch: Columns of `rollout_batch` and, for `kl_generation_trainer` and
            `sampling_importance_ratio`, local `prev_logprobs`. For remote ones,
            `models.validation.gate.agreement` computes both.
    """
    if batch.is_remote:
        lengths = batch.get("written_lengths", batch["rollout_lengths"]).float()
    else:
        lengths = batch["token_mask"].sum(dim=1).float()
    episodes, _ = episodes_of(batch)
    metrics = {
        **reward_metrics(episodes["rewards"]),
        "truncated_fraction": episodes["truncated"].float().mean().item(),
        "completion_length": lengths.mean().item(),
        "completion_length_max": lengths.max().item(),
    }
    if "num_turns" in batch:
        metrics["num_turns"] = episodes["num_turns"].float().mean().item()
    if "prev_logprobs" in batch and not batch.is_remote:
        logprobs = (batch["generation_logprobs"], batch["prev_logprobs"])
        # Without the sequences that the gate has masked, whose tokens nobody trains on.
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        metrics["kl_generation_trainer"] = float(kl_generation_trainer(*logprobs, mask))
        metrics["sampling_importance_ratio"] = float(sampling_importance_ratio(*logprobs, mask))
    return metrics


def mean_advantages(batch: BatchedDataDict) -> Tensor:
    """Returns `[B]`, the mean of `advantages [B, T-1]` over the tokens of each completion.

    If all tokens of a completion have the same advantage, exactly that value is returned;
    `advantages [B]` are returned as they are. For remote advantages, ranks have computed the column
    `mean_advantages`.
    """
    is_remote = isinstance(batch["advantages"], RemoteRows)
    advantages: Tensor = batch["mean_advantages" if is_remote else "advantages"]
    if advantages.dim() == 1:
        return torch.where(batch["sample_mask"].bool(), advantages, 0.0)
    if not advantages.numel():  # a rank may have no rows
        return advantages.new_zeros(len(advantages))
    mask = batch["token_mask"].bool()
    lowest = advantages.masked_fill(~mask, torch.inf).amin(dim=1)
    highest = advantages.masked_fill(~mask, -torch.inf).amax(dim=1)
    return torch.where(lowest == highest, highest, masked_sequence_mean(advantages, mask))


_NUM_SHOWN = 2
_MAX_CHARACTERS = 260  # room for the prompt, the completion, the error and its location


def valid_rollouts(rollouts: Sequence[Rollout]) -> RemoteRollouts:
    """Returns the rollouts without an error, in order; training uses these."""
    return RemoteRollouts.of(rollouts).valid()


def groups_of(rollouts: Sequence[Rollout]) -> Tensor:
    """Returns `[B]`, the group of each rollout."""
    return torch.from_numpy(RemoteRollouts.of(rollouts).group)


def failure_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns `num_failed_rollouts` and `failed_fraction`; there must be at least one rollout."""
    episodes = RemoteRollouts.of(rollouts).episodes()
    num_failed = len(episodes.errors or {})
    return {
        "num_failed_rollouts": float(num_failed),
        "failed_fraction": num_failed / len(episodes),
    }


def refuse_too_many_failures(rollouts: Sequence[Rollout], *, max_failed_fraction: float) -> None:
    """Raises an error if so many rollouts failed that the environment itself must be at fault.

    Args:
        max_failed_fraction: Largest accepted fraction of failures; it is an error at any value if
            all rollouts failed.
    """
    episodes = RemoteRollouts.of(rollouts).episodes()
    errors = list((episodes.errors or {}).values())
    num_failed, total = len(errors), len(episodes)
    if num_failed <= max_failed_fraction * total and not 0 < num_failed == total:
        return
    first = [shorten(each, _MAX_CHARACTERS) for each in dict.fromkeys(errors)][:_NUM_SHOWN]
    raise RewardError(
        f"{num_failed} of {total} rollouts could not be scored",
        expected=f"at most {max_failed_fraction:.0%} of them (max_failed_fraction)"
        if num_failed < total
        else "a reward for at least one",
        got="; ".join(first),
        fix="fix the environment or these rows, or raise rollouts.max_failed_fraction",
    )
