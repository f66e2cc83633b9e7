"""Losses of a critic, its explained variance, and generalized advantage estimation.

Values and returns have equal shapes, of any rank; losses are in squared units of reward.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_rl_core.functional.masked import zero_masked


def clipped_value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float
) -> Tensor:
    """`0.5 * max((v - R)^2, (clip(v, v_old +- c) - R)^2)`, with the factor 1/2 of NeMo RL.

    `v_old` is the value at the time of the rollout. The maximum stops the gradient of values that
    have moved by c towards their return, until the next rollout. Source: the PPO implementations of
    OpenAI baselines; Huang et al. 2022, "The 37 implementation details of proximal policy
    optimization", detail 9.
    """
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """`0.5 * (v - R)^2`."""
    return 0.5 * (values - returns).square()


def return_moments(values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """Returns the moments per token for `explained_variance`: means of R, R^2, R - v, (R - v)^2.

    Their means can be summed over micro-batches, unlike an explained variance. They are detached.
    """
    values, returns = values.detach(), returns.detach()
    return {
        "return_mean": returns,
        "return_square": returns.square(),
        "value_error_mean": returns - values,
        "value_error_square": (returns - values).square(),
    }


def explained_variance(moments: Mapping[str, float]) -> float:
    """`1 - Var(R - v) / Var(R)` over the tokens of a step, of the means of `return_moments`.

    At most 1 (a perfect critic); 0 for a critic that predicts the mean return; negative if worse.
    NaN if all returns are equal.

    Example:
        >>> # R = 1, 3 and v = 1, 2: R - v = 0, 1 with variance 1/4; R has variance 1
        >>> names = ("return_mean", "return_square", "value_error_mean", "value_error_square")
        >>> explained_variance(dict(zip(names, (2.0, 5.0, 0.5, 0.5), strict=True)))
        0.75
    """
    variance = moments["return_square"] - moments["return_mean"] ** 2
    unexplained = moments["value_error_square"] - moments["value_error_mean"] ** 2
    # Below this, the difference of two float32 means is rounding noise.
    if variance <= 1e-6 * moments["return_square"]:
        return float("nan")
    return 1 - unexplained / variance


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the valid tokens of each sequence.

    With `delta_t = r_t + gamma V_next - V_t`, `A_t = delta_t + gamma lam A_next`, where "next" is
    the next valid token: tokens of an observation between two turns are skipped, without discount.
    After the last valid token the value is `last_values`. By default it is 0 for finished and
    truncated completions, as in most PPO implementations for language models. Source: Schulman et
    al. 2016, arXiv:1506.02438, equation 16.

    Args:
        rewards: `[B, T-1]`; read at valid tokens only.
        values: `[B, T-1]`: the critic's value at each token; read at valid tokens only.
        mask: `[B, T-1]` bool.
        gamma: Discount per token, in [0, 1].
        lam: Weight of longer returns, in [0, 1].
        last_values: `[B]`: the critic's value after the last valid token; 0 for finished sequences.
            None is 0 for all.

    Returns:
        `[B, T-1]` advantages and `[B, T-1]` returns `A + V` (the critic's targets), both 0 at
        invalid tokens.
    """
    rewards, values = zero_masked(rewards, mask), zero_masked(values, mask)
    advantages = torch.zeros_like(values)
    next_advantage = values.new_zeros(len(values))
    next_value = next_advantage if last_values is None else last_values
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        is_valid = mask[:, t]
        advantages[:, t] = advantage
        next_value = torch.where(is_valid, values[:, t], next_value)
        next_advantage = torch.where(is_valid, advantage, next_advantage)
    advantages = zero_masked(advantages, mask)
    return advantages, advantages + values
