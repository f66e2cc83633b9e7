"""How far the rollout engine's logprobs are from the trainer's for the same tokens and weights.

Both are in nats under the sampling temperature, `[B, T-1]`, with a bool `mask [B, T-1]`. A value
that is not finite at a valid token stays so in the result: a gate must refuse NaN as well.
"""

import torch
from torch import Tensor

from nemo_rl_core.functional.kl import kl_estimate
from nemo_rl_core.functional.masked import masked_mean, masked_sequence_mean


def token_mult_prob_error(
    generation_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """`mean exp|gen - prev|`: the mean factor by which the two probabilities differ.

    1 is agreement; 1.05 is the usual alarm. It is 0 only where no token is valid.
    Source: NeMo RL's `token_mult_prob_error`.

    Args:
        generation_logprobs: `[B, T-1]` as the engine reported them.
        trainer_logprobs: `[B, T-1]` under the trainer's weights at the start of the step.
        mask: `[B, T-1]` bool.

    Returns:
        0-dim.
    """
    return masked_mean(torch.exp((generation_logprobs - trainer_logprobs).abs()), mask)


def sequence_mult_prob_error(
    generation_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """`token_mult_prob_error` of each sequence alone, which names the one that is off.

    Args:
        generation_logprobs: `[B, T-1]`.
        trainer_logprobs: `[B, T-1]`.
        mask: `[B, T-1]` bool.

    Returns:
        `[B]`; 0 for a sequence without a valid token.
    """
    return masked_sequence_mean(torch.exp((generation_logprobs - trainer_logprobs).abs()), mask)


def sampling_importance_ratio(
    generation_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """`mean exp(prev - gen)`, whose expectation is 1 when the engine samples as it reports.

    Args:
        generation_logprobs: `[B, T-1]`.
        trainer_logprobs: `[B, T-1]`.
        mask: `[B, T-1]` bool.

    Returns:
        0-dim.
    """
    return masked_mean(torch.exp(trainer_logprobs - generation_logprobs), mask)


def kl_generation_trainer(
    generation_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """`KL(gen || prev)` in nats a token, by k3 with the clamps of `kl_estimate`.

    Args:
        generation_logprobs: `[B, T-1]`.
        trainer_logprobs: `[B, T-1]`.
        mask: `[B, T-1]` bool.

    Returns:
        0-dim, never negative.
    """
    return masked_mean(kl_estimate(generation_logprobs, trainer_logprobs, kind="k3"), mask)
