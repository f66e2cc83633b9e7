"""Differences between the rollout engine's and the trainer's logprobs, and their correction.

Both are for the same tokens and weights, in nats under the sampling temperature, `[B, T-1]`, with a
bool `mask [B, T-1]`. Measures keep non-finite values at valid tokens, since a gate must refuse NaN;
weights replace them by 0.
"""

import torch
from torch import Tensor

from nemo_rl_core.functional.kl import kl_estimate
from nemo_rl_core.functional.masked import masked_mean, masked_sequence_mean, zero_masked


def token_mult_prob_error(
    generation_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """`mean exp|gen - prev|`: the mean factor by which the two probabilities differ.

    1 is agreement; 1.05 is the usual alarm. It is 0 only without valid tokens. Source: NeMo RL's
    `token_mult_prob_error`.

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
    """`token_mult_prob_error` of each sequence, which identifies outliers.

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
    """`KL(gen || prev)` in nats per token, by k3 with the clamps of `kl_estimate`; no gradient.

    Args:
        generation_logprobs: `[B, T-1]`.
        trainer_logprobs: `[B, T-1]`.
        mask: `[B, T-1]` bool.

    Returns:
        0-dim, never negative.
    """
    return masked_mean(kl_estimate(generation_logprobs, trainer_logprobs, kind="k3"), mask)


def importance_weight(generation_logprobs: Tensor, trainer_logprobs: Tensor) -> Tensor:
    """`exp(prev - gen)`, detached: the trainer's probability of a sampled token over the engine's.

    A weight that is not finite (a token with probability 0 in the engine) becomes 0.

    Args:
        generation_logprobs: Any shape.
        trainer_logprobs: The same shape.

    Returns:
        The shape of the inputs.
    """
    return torch.exp((trainer_logprobs - generation_logprobs).detach()).nan_to_num(
        nan=0.0, posinf=0.0
    )


def sequence_importance_weight(
    generation_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """The geometric mean of `importance_weight` over each sequence, at each of its tokens.

    One token with a non-finite weight makes it 0 for the whole sequence.

    Args:
        generation_logprobs: `[B, T-1]`.
        trainer_logprobs: `[B, T-1]`.
        mask: `[B, T-1]` bool.

    Returns:
        `[B, T-1]`, equal along a row; 1 for a sequence without a valid token.
    """
    mean_log_ratio = masked_sequence_mean(trainer_logprobs - generation_logprobs, mask)
    weight = importance_weight(torch.zeros_like(mean_log_ratio), mean_log_ratio)
    return weight[:, None].expand(mask.shape)


def truncated_weight(weight: Tensor, *, cap: float) -> Tensor:
    """`min(w, cap)`: truncated importance sampling (TIS).

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training", https://fengyao.notion.site/off-policy-rl.

    Args:
        weight: Any shape, not negative.
        cap: The largest weight.
    """
    return weight.clamp(max=cap)


def band_weight(weight: Tensor, *, low: float, high: float) -> Tensor:
    """`w` inside `[low, high]` and 0 outside: tokens with strong disagreement are left out.

    Source: IcePop, Ling Team 2025, arXiv:2510.18855.

    Args:
        weight: Any shape.
        low: The smallest weight to keep.
        high: The largest weight to keep.
    """
    return zero_masked(weight, (weight >= low) & (weight <= high))


def sequence_mask_weight(
    weight: Tensor, sequence_weight: Tensor, *, low: float, high: float
) -> Tensor:
    """`w` in sequences whose geometric mean lies inside `[low, high]`, and 0 in the others.

    Args:
        weight: `[B, T-1]`.
        sequence_weight: `[B, T-1]` as `sequence_importance_weight` returns it.
        low: The smallest mean to keep.
        high: The largest mean to keep.
    """
    return zero_masked(weight, (sequence_weight >= low) & (sequence_weight <= high))
