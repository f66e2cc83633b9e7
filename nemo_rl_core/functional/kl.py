"""Estimators of a Kullback-Leibler divergence from the logprobs of sampled tokens.

Logprobs are in nats, of the same tokens under both models; results have their shape.
"""

from typing import Literal

import torch
from torch import Tensor

from nemo_rl_core.functional.masked import masked_mean

KLKind = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Bound on `ref - cur` in nats, so that one token cannot overflow `exp`."""

MAX_ESTIMATE = 10.0
"""Bound on the value of a token's estimate in nats, so that one token cannot dominate the step."""


def kl_estimate(policy: Tensor, reference: Tensor, *, kind: KLKind) -> Tensor:
    """Estimates `KL(policy || reference)` token by token, for tokens sampled from `policy`.

    With `d = clamp(reference - policy, +-20)`: k1 is `-d` (unbiased, may be negative), k2 is
    `d^2 / 2` (biased, small variance), k3 is `e^d - 1 - d` (unbiased and never negative). The
    result is clamped to +-10. Source: Schulman 2020, "Approximating KL divergence",
    http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = (reference - policy).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match kind:
        case "k1":
            estimate = -log_ratio
        case "k2":
            estimate = log_ratio.square() / 2
        case "k3":
            # expm1 keeps the digits that exp(d) - 1 loses when the two policies are close.
            estimate = torch.expm1(log_ratio) - log_ratio
    return estimate.clamp(-MAX_ESTIMATE, MAX_ESTIMATE)


def score_function_weight(current: Tensor) -> Tensor:
    """`exp(cur - stopgrad(cur))`: the value is 1, the gradient is that of `cur`.

    Multiplied with a function `f(cur)` of tokens sampled from the current policy, it adds the
    score-function term `f * grad(cur)`; the mean gradient is then the gradient of the mean of `f`.
    `f` must not be clamped: a clamp removes the gradient of `f` and only the added term remains.
    """
    return torch.exp(current - current.detach())


def kl_penalty(current: Tensor, reference: Tensor, *, kind: KLKind) -> Tensor:
    """The value of `kl_estimate` with the gradient of `KL(policy || reference)`.

    The gradient of every kind is `-d * grad(cur)` with `d = clamp(reference - policy, +-20)`, the
    score-function gradient of the divergence: its mean over tokens that were sampled from the
    current policy is the divergence's gradient. The clamp of the value does not affect it, so a
    token that is far more likely under the reference still has a gradient. DeepSeekMath's k3
    (arXiv:2402.03300, equation 4) has the gradient `1 - e^d` per token, whose mean is the gradient
    of `KL(reference || policy)` for samples of the policy.
    """
    fixed = current.detach()
    slope = (fixed - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return kl_estimate(fixed, reference, kind=kind) + slope * (current - fixed)


def kl_generation_trainer(
    generation_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """Mean `KL(gen || prev)` per token, by k3 with the clamps of `kl_estimate`; 0-dim."""
    return masked_mean(kl_estimate(generation_logprobs, trainer_logprobs, kind="k3"), mask)
