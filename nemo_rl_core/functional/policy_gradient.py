"""Policy-gradient losses of single tokens, before importance weights, masks and reduction.

Logprobs are in nats; `advantages` are constants, positive for tokens that should become more
likely. All tensors are `[B, T-1]`, finite at masked tokens (apply `zero_masked` first); results are
unmasked.
"""

import torch
from torch import Tensor

from nemo_rl_core.functional.kl import score_function_weight
from nemo_rl_core.functional.masked import masked_sequence_mean


def token_ratio(current: Tensor, previous: Tensor) -> Tensor:
    """`exp(cur - prev)`.

    Args:
        current: `[B, T-1]` under the weights being trained.
        previous: `[B, T-1]` under those at the start of the step; no gradient.
    """
    return torch.exp(current - previous)


def sequence_ratio(current: Tensor, previous: Tensor, mask: Tensor) -> Tensor:
    """`exp(mean_t(cur - prev))`: one ratio per sequence, the geometric mean of token ratios.

    Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, equation 7.

    Args:
        current: `[B, T-1]` under the weights being trained.
        previous: `[B, T-1]` under those at the start of the step; no gradient.
        mask: `[B, T-1]` bool.

    Returns:
        `[B, T-1]`, equal along a row; 1 for a sequence without a valid token.
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

    Sources: PPO, arXiv:1707.06347, equation 7; two bounds, DAPO, arXiv:2503.14476; dual clip,
    which bounds the loss where A < 0 and r is large, Ye et al. 2020, arXiv:1912.09729, equation 5.

    Args:
        ratio: `[B, T-1]`.
        advantages: `[B, T-1]`.
        clip_low: Distance of the lower bound from 1.
        clip_high: Distance of the upper bound from 1.
        dual_clip: c, above `1 + clip_high`; None leaves it out.
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

    Source: MiniMax-M1, arXiv:2506.13585, equation 4.

    Args:
        current: `[B, T-1]` under the weights being trained.
        ratio: `[B, T-1]`.
        advantages: `[B, T-1]`.
        clip_low: Distance of the lower bound from 1; 1 leaves it out.
        clip_high: Distance of the upper bound from 1.
    """
    return -advantages * ratio.detach().clamp(1 - clip_low, 1 + clip_high) * current


def reinforce(current: Tensor, advantages: Tensor) -> Tensor:
    """`-A cur`. Source: Williams 1992, "Simple statistical gradient-following algorithms".

    Args:
        current: `[B, T-1]` under the weights being trained.
        advantages: `[B, T-1]`.
    """
    return -advantages * current


def sapo(ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> Tensor:
    """`-A sigmoid(tau (r - 1)) 4 / tau`: a smooth gate instead of a clip.

    Its slope in r is `-A` at r = 1 and decays on both sides, faster for larger tau. Source: SAPO,
    Gao et al. 2025, arXiv:2511.20347, section 3.

    Args:
        ratio: `[B, T-1]`.
        advantages: `[B, T-1]`.
        tau_positive: tau where A > 0.
        tau_negative: tau elsewhere.
    """
    tau = torch.where(
        advantages > 0, torch.full_like(ratio, tau_positive), torch.full_like(ratio, tau_negative)
    )
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau


def sampled_entropy(current: Tensor) -> Tensor:
    """`-exp(cur - stopgrad(cur)) cur`: each sampled token's contribution to the policy's entropy.

    Over samples from the policy, its mean is the entropy and its mean gradient is the entropy's
    gradient.

    Args:
        current: `[B, T-1]` under the weights being trained.
    """
    return -score_function_weight(current) * current
