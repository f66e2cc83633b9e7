"""Divergences between a teacher and a student over a few tokens of the vocabulary."""

import torch
from torch import Tensor

_SERIES_BOUND = 1.0
"""Log-ratio in nats below which `e^d - 1 - d` needs `expm1` for precision."""


def renormalized(topk_logprobs: Tensor) -> Tensor:
    """Renormalizes logprobs `[..., K]` over K tokens, so that their probabilities sum to 1."""
    return torch.log_softmax(topk_logprobs, dim=-1)


def kl_divergence(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """`KL(p || q) = sum_k p_k (log p_k - log q_k)` of two normalized distributions, `[..., K]`.

    Computed as `sum_k p_k (e^d - 1 - d)` with `d = log q_k - log p_k`, which is the same since p
    and q both sum to 1. No term is negative, so rounding cannot make the sum negative, and nearly
    equal distributions keep precision: equal inputs give exactly 0. Inputs must be finite.
    """
    log_ratio = q_logprobs - p_logprobs
    p = p_logprobs.exp()
    clamped_ratio = log_ratio.clamp(-_SERIES_BOUND, _SERIES_BOUND)
    # For large d nothing cancels, and p e^d is computed as q, since e^d could overflow.
    terms = torch.where(
        log_ratio.abs() <= _SERIES_BOUND,
        p * (torch.expm1(clamped_ratio) - clamped_ratio),
        q_logprobs.exp() - p - p * log_ratio,
    )
    return terms.sum(dim=-1)
