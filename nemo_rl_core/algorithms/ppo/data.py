"""Token rewards, values and advantages from scored rollouts and the critic."""

from torch import Tensor

from nemo_rl_core.algorithms.ppo.config import KLInReward, PPOConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.advantages import whitened
from nemo_rl_core.functional.kl import kl_estimate
from nemo_rl_core.functional.masked import valid_token_mask, zero_masked
from nemo_rl_core.functional.rewards import outcome_rewards
from nemo_rl_core.functional.value import gae


def value_columns(values: Tensor, batch: BatchedDataDict) -> dict[str, Tensor]:
    """The critic's values as columns of a batch.

    Args:
        values: `[B, T]` of the prefixes that end with each token.
        batch: Has `input_lengths [B]`.

    Returns:
        `old_values [B, T-1]`, at t of the state in which token t+1 is chosen, and `last_values
        [B]`, of the state after the last token.
    """
    last = (batch["input_lengths"] - 1)[:, None]
    return {"old_values": values[:, :-1], "last_values": values.gather(1, last)[:, 0]}


def add_advantages(batch: BatchedDataDict, config: PPOConfig) -> BatchedDataDict:
    """Adds advantages to a copy of the batch of a whole step.

    The outcome's reward is assigned to the last token of the completion, and the KL penalty to
    every token (InstructGPT, arXiv:2203.02155, section 3.5). Advantages are whitened over all
    tokens of the step, so call this before splitting it into optimizer steps and micro-batches.

    Args:
        batch: From `rollout_batch` and `value_columns` and, with a KL penalty, `prev_logprobs` and
            `reference_logprobs`, `[B, T-1]` each.
        config: `gamma`, `lam`, the penalty, and whether truncated completions are bootstrapped.

    Returns:
        The columns of `batch`, `advantages [B, T-1]` and `returns [B, T-1]`, 0 at masked tokens.
    """
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    rewards = outcome_rewards(batch["rewards"], mask)
    if config.kl is not None:
        rewards = rewards - config.kl.beta * _token_kl(batch, config.kl)
    advantages, returns = gae(
        rewards,
        batch["old_values"],
        mask,
        gamma=config.gamma,
        lam=config.lam,
        last_values=_last_values(batch) if config.bootstrap_truncated else None,
    )
    columns = {"advantages": whitened(advantages, mask), "returns": returns}
    return BatchedDataDict({**batch, **columns})


def _last_values(batch: BatchedDataDict) -> Tensor:
    """The critic's values for truncated completions, and 0 for finished ones."""
    return zero_masked(batch["last_values"], batch["truncated"])


def _token_kl(batch: BatchedDataDict, penalty: KLInReward) -> Tensor:
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    estimate = kl_estimate(batch["prev_logprobs"], batch["reference_logprobs"], kind=penalty.kind)
    return zero_masked(estimate, mask)
