"""Token rewards, values and advantages from scored rollouts and the critic."""

from torch import Tensor

from nemo_rl_core.algorithms.ppo.config import PPOConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.advantages import Moments, whitened
from nemo_rl_core.functional.custom_advantage import AdvantageFunction
from nemo_rl_core.functional.kl import kl_estimate
from nemo_rl_core.functional.masked import valid_token_mask, zero_masked
from nemo_rl_core.functional.rewards import outcome_rewards
from nemo_rl_core.functional.value import gae


def value_columns(values: Tensor, batch: BatchedDataDict) -> dict[str, Tensor]:
    """Converts the critic's values to columns of a batch.

    Args:
        values: `[B, T]`, the value of the prefix that ends with each token.
        batch: `input_lengths [B]`.

    Returns:
        `old_values [B, T-1]`, at index t of the state in which token t+1 is chosen, and
        `last_values [B]` of the state after the last token.
    """
    last = (batch["input_lengths"] - 1)[:, None]
    return {"old_values": values[:, :-1], "last_values": values.gather(1, last)[:, 0]}


def add_advantages(batch: BatchedDataDict, config: PPOConfig) -> BatchedDataDict:
    """Adds `advantages` and `returns`, `[B, T-1]`, to a copy of the batch of a full step.

    Advantages are whitened over all tokens of the step, so call this before splitting it into
    optimizer steps and micro-batches. With remote tokens, ranks call the functions below.
    """
    data = BatchedDataDict({**batch, **unwhitened_advantages(batch, config)})
    return BatchedDataDict({**data, **whitened_advantages(data, advantage_moments(data))})


def unwhitened_advantages(
    batch: BatchedDataDict, config: PPOConfig, advantage_fn: AdvantageFunction | None = None
) -> dict[str, Tensor]:
    """Computes `advantages` before whitening, and `returns`, of any rows of a step.

    The outcome's reward is assigned to the last token of the completion, and the KL penalty to
    every token (InstructGPT, arXiv:2203.02155, section 3.5). Both results are `[B, T-1]`, 0 at
    masked tokens.

    Args:
        batch: From `rollout_batch` and `value_columns` and, with a KL penalty, `prev_logprobs` and
            `reference_logprobs`, `[B, T-1]` each.
        config: `gamma`, `lam`, the penalty, and whether truncated completions are bootstrapped.
        advantage_fn: A custom function of rewards and values; None takes `gae`.
    """
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    rewards = outcome_rewards(batch["rewards"], mask)
    if config.kl is not None:
        previous, reference = batch["prev_logprobs"], batch["reference_logprobs"]
        estimate = kl_estimate(previous, reference, kind=config.kl.kind)
        rewards = rewards - config.kl.beta * zero_masked(estimate, mask)
    if advantage_fn is not None:
        names = ("last_values", "truncated")
        columns = {"rewards": rewards, "values": zero_masked(batch["old_values"], mask)}
        columns |= {"mask": mask} | {name: batch[name] for name in names}
        advantages, returns = advantage_fn.of_critic(columns)
        return {"advantages": advantages, "returns": returns}
    last_values = zero_masked(batch["last_values"], batch["truncated"])  # 0 for finished ones
    advantages, returns = gae(
        rewards,
        batch["old_values"],
        mask,
        gamma=config.gamma,
        lam=config.lam,
        last_values=last_values if config.bootstrap_truncated else None,
    )
    return {"advantages": advantages, "returns": returns}


def critic_columns(
    batch: BatchedDataDict, config: PPOConfig, advantage_fn: AdvantageFunction | None = None
) -> dict[str, Tensor]:
    """Returns `value_columns` of the column `values [B, T]`, and the `unwhitened_advantages`."""
    columns = value_columns(batch["values"], batch)
    data = BatchedDataDict({**batch, **columns})
    return {**columns, **unwhitened_advantages(data, config, advantage_fn)}


def advantage_moments(batch: BatchedDataDict) -> Moments:
    """Computes the moments of unwhitened advantages at all tokens that are trained on."""
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    return Moments.of(batch["advantages"], mask)


def whitened_advantages(batch: BatchedDataDict, moments: Moments) -> dict[str, Tensor]:
    """Whitens the column `advantages [B, T-1]` with the moments of the step."""
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    return {"advantages": whitened(batch["advantages"], mask, moments)}
