"""Policy-gradient losses per token, and importance weights that correct them.

Logprobs are in nats under the sampling temperature, `[B, T-1]`, with a bool `mask [B, T-1]`:
`current` under the weights being trained, `previous` under those at the start of the step (no
gradient). Losses take tensors that are finite at masked tokens (apply `zero_masked` first) and
return unmasked results, `[B, T-1]` like `ratio` and `advantages`, which are constants, positive for
tokens that should become more likely. Importance weights are the trainer's probability of a token
divided by the rollout engine's, for the same model weights; non-finite ones become 0.
"""

import torch
from torch import Tensor

from nemo_rl_core.functional.kl import score_function_weight
from nemo_rl_core.functional.masked import masked_mean, masked_sequence_mean, zero_masked


def token_ratio(current: Tensor, previous: Tensor) -> Tensor:
    """`exp(cur - prev)`."""
    return torch.exp(current - previous)


def sequence_ratio(current: Tensor, previous: Tensor, mask: Tensor) -> Tensor:
    """`exp(mean_t(cur - prev))`: one ratio per sequence, the geometric mean of token ratios.

    It is equal along a row, and 1 for sequences without valid tokens. Source: GSPO, Zheng et al.
    2025, arXiv:2507.18071, equation 7.
    """
    ratio = torch.exp(masked_sequence_mean(current - previous, mask))
    return ratio[:, None].expand(mask.shape)


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`; with a dual clip at most `-A c`.

    The dual clip c, above `1 + clip_high`, bounds the loss where A < 0 and r is large. Sources:
    PPO, arXiv:1707.06347, equation 7; two bounds, DAPO, arXiv:2503.14476; dual clip, Ye et al.
    2020, arXiv:1912.09729, equation 5.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def cispo(
    current: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """`-A stopgrad(clip r) cur`: the clip bounds a token's weight without removing its gradient.

    A `clip_low` of 1 sets no lower bound. Source: MiniMax-M1, arXiv:2506.13585, equation 4.
    """
    return -advantages * ratio.detach().clamp(1 - clip_low, 1 + clip_high) * current


def reinforce(current: Tensor, advantages: Tensor) -> Tensor:
    """`-A cur`. Source: Williams 1992, "Simple statistical gradient-following algorithms"."""
    return -advantages * current


def sapo(ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> Tensor:
    """`-A sigmoid(tau (r - 1)) 4 / tau`: a smooth gate instead of a clip.

    Its slope in r is `-A` at r = 1 and decays on both sides, faster for larger tau, which is
    `tau_positive` where A > 0. Source: SAPO, Gao et al. 2025, arXiv:2511.20347, section 3.
    """
    tau = torch.where(
        advantages > 0, torch.full_like(ratio, tau_positive), torch.full_like(ratio, tau_negative)
    )
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau


def sampled_entropy(current: Tensor) -> Tensor:
    """`-exp(cur - stopgrad(cur)) cur`: each sampled token's contribution to the policy's entropy.

    Over samples from the policy, its mean is the entropy and its mean gradient is the entropy's
    gradient.
    """
    return -score_function_weight(current) * current


def sampling_importance_ratio(
    generation_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """`mean exp(prev - gen)`, 0-dim; its expectation is 1 when the engine samples as it reports."""
    return masked_mean(torch.exp(trainer_logprobs - generation_logprobs), mask)


def importance_weight(generation_logprobs: Tensor, trainer_logprobs: Tensor) -> Tensor:
    """`exp(prev - gen)`, detached: trainer's over engine's probability of a sampled token.

    A non-finite weight (a token with probability 0 in the engine) becomes 0. Any shape.
    """
    return torch.exp((trainer_logprobs - generation_logprobs).detach()).nan_to_num(
        nan=0.0, posinf=0.0
    )


def sequence_importance_weight(
    generation_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """The geometric mean of `importance_weight` over each sequence, at each of its tokens.

    One token with a non-finite weight makes it 0 for the entire sequence; it is 1 for sequences
    without valid tokens.
    """
    mean_log_ratio = masked_sequence_mean(trainer_logprobs - generation_logprobs, mask)
    weight = importance_weight(torch.zeros_like(mean_log_ratio), mean_log_ratio)
    return weight[:, None].expand(mask.shape)


def truncated_weight(weight: Tensor, *, cap: float) -> Tensor:
    """`min(w, cap)`: truncated importance sampling (TIS).

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training", https://fengyao.notion.site/off-policy-rl.
    """
    return weight.clamp(max=cap)


def band_weight(weight: Tensor, *, low: float, high: float) -> Tensor:
    """`w` inside `[low, high]` and 0 outside: drops tokens with strong disagreement.

    Source: IcePop, Ling Team 2025, arXiv:2510.18855.
    """
    return zero_masked(weight, (weight >= low) & (weight <= high))


def sequence_mask_weight(
    weight: Tensor, sequence_weight: Tensor, *, low: float, high: float
) -> Tensor:
    """`w` in sequences whose geometric mean is inside `[low, high]`, and 0 in the others.

    `sequence_weight` is from `sequence_importance_weight`.
    """
    return zero_masked(weight, (sequence_weight >= low) & (sequence_weight <= high))
