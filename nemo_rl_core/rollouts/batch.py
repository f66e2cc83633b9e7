"""Scored rollouts as a training batch, and its figures.

Rollouts that could not be scored are set aside and counted, never taken for bad ones.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nemo_rl_core.distributed.batched_data_dict import (
    BatchedDataDict,
    collate,
    collate_completions,
    flat_tensor,
)
from nemo_rl_core.distributed.held_rows import HeldRows
from nemo_rl_core.environments.interfaces import shorten
from nemo_rl_core.errors import RewardError
from nemo_rl_core.functional.kl import kl_generation_trainer
from nemo_rl_core.functional.masked import masked_sequence_mean, valid_token_mask
from nemo_rl_core.functional.policy_gradient import sampling_importance_ratio
from nemo_rl_core.rollouts.held import HeldRollouts
from nemo_rl_core.types import Completion, Rollout


def rollout_batch(rollouts: Sequence[Rollout]) -> BatchedDataDict:
    """Scored rollouts as tensors, trained on what the policy wrote.

    Args:
        rollouts: `B`, in order, all with a reward.

    Returns:
        What `collate` returns, and `rewards [B]`, `generation_logprobs [B, T-1]` (0 where the
        policy did not write), both with `HeldRows` in place of values a token where the rollouts
        are held, `truncated [B]`, `rollout_lengths [B]` (tokens behind the prompt, an
        environment's too, that have used up the rollout's room), `weight_versions [B, T-1]` where
        the engine took new weights in between (0 where the policy did not write), `num_turns [B]`
        where an environment answered, and, where it gives several rewards, `reward_components
        [B, R]`.

    Raises:
        RewardError: If the rollouts differ in how many rewards they have, or one could not be
            scored.
    """
    if isinstance(rollouts, HeldRollouts):
        batch = rollouts.batch()
        batch["rewards"] = rewards_of(rollouts)
        return _with_components(batch, rollouts.components)
    completions = [rollout.completion for rollout in rollouts]
    if any(each.generated for each in completions):
        batch = collate(
            [rollout.prompt.token_ids + rollout.completion.token_ids for rollout in rollouts],
            [
                (False,) * len(rollout.prompt.token_ids) + rollout.completion.token_mask
                for rollout in rollouts
            ],
        )
    else:  # without a Python object a token of the masks
        batch = collate_completions(
            [rollout.prompt.token_ids for rollout in rollouts],
            [each.token_ids for each in completions],
        )
    logprobs = torch.zeros(batch["token_mask"].shape)
    _refuse_other_lengths([(each.token_ids, each.logprobs) for each in completions])
    # float32, as a list of Python's numbers becomes.
    values = flat_tensor((each.logprobs for each in completions), np.float32)
    logprobs[batch["token_mask"]] = values[_written(completions)]
    batch.update(
        generation_logprobs=logprobs,
        rewards=rewards_of(rollouts),
        truncated=torch.tensor([rollout.completion.truncated for rollout in rollouts]),
        rollout_lengths=torch.tensor(
            [
                len(rollout.completion.token_ids) + rollout.completion.num_unread_tokens
                for rollout in rollouts
            ]
        ),
    )
    if any(rollout.completion.weight_versions for rollout in rollouts):
        batch["weight_versions"] = _weight_versions(rollouts, batch["token_mask"])
    if any(rollout.turn_rewards for rollout in rollouts):
        batch["num_turns"] = torch.tensor([len(rollout.turn_rewards) for rollout in rollouts])
    return _with_components(batch, [rollout.components for rollout in rollouts])


def _with_components(
    batch: BatchedDataDict, components: Sequence[Sequence[float]]
) -> BatchedDataDict:
    counts = sorted({len(values) for values in components}) or [0]
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


def _weight_versions(rollouts: Sequence[Rollout], token_mask: Tensor) -> Tensor:
    versions = torch.zeros(token_mask.shape, dtype=torch.long)
    completions = [rollout.completion for rollout in rollouts]
    _refuse_other_lengths([(each.token_ids, each.weight_versions) for each in completions])
    drawn_with = flat_tensor((each.weight_versions for each in completions), np.int64)
    versions[token_mask] = drawn_with[_written(completions)]
    return versions


def _written(completions: Sequence[Completion]) -> Tensor | slice:
    """Which of all tokens, in one line, the policy wrote."""
    if not any(each.generated for each in completions):
        return slice(None)
    return flat_tensor((each.token_mask for each in completions), np.bool_)


def _refuse_other_lengths(pairs: Sequence[tuple[Sequence[object], Sequence[object]]]) -> None:
    for row, (tokens, values) in enumerate(pairs):
        if len(tokens) != len(values):
            raise ValueError(
                f"rollout {row}: {len(tokens)} tokens but {len(values)} values of them"
            )


def _reward(rollout: Rollout) -> float:
    if rollout.error is not None:
        raise RewardError(
            f"a rollout of prompt {rollout.prompt.id!r} that could not be scored is in the batch",
            expected="rollouts with a reward",
            got=rollout.error,
            fix="leave such rollouts out: rollout_batch(valid_rollouts(rollouts))",
        )
    if rollout.reward is None:
        raise ValueError(f"rollout of prompt {rollout.prompt.id!r} has not been scored")
    return rollout.reward


def rewards_of(rollouts: Sequence[Rollout]) -> Tensor:
    """`[B]` rewards.

    Raises:
        RewardError: If one could not be scored.
    """
    if isinstance(rollouts, HeldRollouts):
        if rollouts.errors or rollouts.rewards is None:
            _reward(rollouts[next(iter(rollouts.errors or {0: ""}))])
        return torch.from_numpy(rollouts.rewards).float()
    return torch.tensor([float(_reward(rollout)) for rollout in rollouts])


def reward_metrics(rewards: Tensor) -> dict[str, float]:
    """Mean `reward` and its deviation `reward_std` of `[B]` rewards."""
    deviation = rewards.std(correction=min(1, len(rewards) - 1))
    return {"reward": rewards.mean().item(), "reward_std": deviation.item()}


def rollout_metrics(batch: BatchedDataDict) -> dict[str, float]:
    """Rewards and lengths of a step and, where the trainer has looked, how far the engine is off.

    Args:
        batch: What `rollout_batch` returns and, for `kl_generation_trainer` and
            `sampling_importance_ratio`, `prev_logprobs`; of held ones `agreement` has both.
    """
    if batch.is_held:
        lengths = batch.get("written_lengths", batch["rollout_lengths"]).float()
    else:
        lengths = batch["token_mask"].sum(dim=1).float()
    metrics = {
        **reward_metrics(batch["rewards"]),
        "truncated_fraction": batch["truncated"].float().mean().item(),
        "completion_length": lengths.mean().item(),
        "completion_length_max": lengths.max().item(),
    }
    if "num_turns" in batch:
        metrics["num_turns"] = batch["num_turns"].float().mean().item()
    if "prev_logprobs" in batch and not batch.is_held:
        logprobs = (batch["generation_logprobs"], batch["prev_logprobs"])
        # Without the sequences that the gate has masked, whose tokens nobody trains on.
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        metrics["kl_generation_trainer"] = float(kl_generation_trainer(*logprobs, mask))
        metrics["sampling_importance_ratio"] = float(sampling_importance_ratio(*logprobs, mask))
    return metrics


def mean_advantages(batch: BatchedDataDict) -> Tensor:
    """`[B]`: the mean of `advantages [B, T-1]` over each completion's tokens.

    Where all tokens of a completion have the same, it is that one, without the mean's rounding; so
    it is of `advantages [B]`, which are those of rows without values of tokens. Of advantages that
    lie elsewhere, ranks have put the means into the column `mean_advantages`.
    """
    is_held = isinstance(batch["advantages"], HeldRows)
    advantages: Tensor = batch["mean_advantages" if is_held else "advantages"]
    if advantages.dim() == 1:
        return torch.where(batch["sample_mask"].bool(), advantages, 0.0)
    if not advantages.numel():  # a rank may have no rows
        return advantages.new_zeros(len(advantages))
    mask = batch["token_mask"].bool()
    lowest = advantages.masked_fill(~mask, torch.inf).amin(dim=1)
    highest = advantages.masked_fill(~mask, -torch.inf).amax(dim=1)
    return torch.where(lowest == highest, highest, masked_sequence_mean(advantages, mask))


_NUM_SHOWN = 2
_MAX_CHARACTERS = 260  # room for the prompt, the completion, the error and its place


def valid_rollouts(rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    """Those without an error, in order: what is trained on."""
    if isinstance(rollouts, HeldRollouts):
        return rollouts.valid()
    return [rollout for rollout in rollouts if rollout.error is None]


def failed_rollouts(rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    """Those with an error, in order."""
    if isinstance(rollouts, HeldRollouts):
        return rollouts.select(np.flatnonzero(~rollouts.is_valid))
    return [rollout for rollout in rollouts if rollout.error is not None]


def groups_of(rollouts: Sequence[Rollout]) -> Tensor:
    """`[B]`, the group of each."""
    if isinstance(rollouts, HeldRollouts):
        return torch.from_numpy(rollouts.group)
    return torch.tensor([rollout.group for rollout in rollouts])


def selected(rollouts: Sequence[Rollout], mask: Tensor) -> Sequence[Rollout]:
    """Those that a mask `[B]` says, in order."""
    if isinstance(rollouts, HeldRollouts):
        return rollouts.select(mask.nonzero()[:, 0].numpy())
    return [rollout for rollout, keep in zip(rollouts, mask.tolist(), strict=True) if keep]


def joined(parts: Sequence[Sequence[Rollout]]) -> Sequence[Rollout]:
    """The rollouts of one part after the other."""
    held = [part for part in parts if isinstance(part, HeldRollouts)]
    if len(held) == len(parts):
        return HeldRollouts.joined(held)
    return [rollout for part in parts for rollout in part]


def failure_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """`num_failed_rollouts` and `failed_fraction` of at least one rollout."""
    num_failed = len(rollouts) - len(valid_rollouts(rollouts))
    return {
        "num_failed_rollouts": float(num_failed),
        "failed_fraction": num_failed / len(rollouts),
    }


def refuse_too_many_failures(rollouts: Sequence[Rollout], *, max_failed_fraction: float) -> None:
    """Stops where so many could not be scored that the environment itself must be at fault.

    Args:
        rollouts: All that were scored at once.
        max_failed_fraction: The largest share of failures that is accepted; that nothing at all is
            left never is.

    Raises:
        RewardError: Past that share; with the first errors.
    """
    if isinstance(rollouts, HeldRollouts):
        errors = list((rollouts.errors or {}).values())
    else:
        errors = [rollout.error for rollout in rollouts if rollout.error is not None]
    num_failed, total = len(errors), len(rollouts)
    if num_failed <= max_failed_fraction * total and not 0 < num_failed == total:
        return
    first = [shorten(each, _MAX_CHARACTERS) for each in dict.fromkeys(errors)][:_NUM_SHOWN]
    raise RewardError(
        f"{num_failed} of {total} rollouts could not be scored",
        expected=f"at most {max_failed_fraction:.0%} of them (max_failed_fraction)"
        if num_failed < total
        else "a reward for at least one",
        got="; ".join(first),
        fix="mend the environment or these rows, or raise rollouts.max_failed_fraction",
    )
