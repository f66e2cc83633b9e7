"""The two losses of PPO: the policy's clipped surrogate, and the critic's squared error.

The KL penalty is part of the reward, and so of the advantages; neither loss contains it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from nemo_rl_core.algorithms.ppo.config import ClippedSurrogate
from nemo_rl_core.functional.kl import kl_estimate
from nemo_rl_core.functional.masked import (
    masked_sum,
    masked_sums,
    valid_token_mask,
    zero_masked,
)
from nemo_rl_core.functional.policy_gradient import clipped_surrogate, token_ratio
from nemo_rl_core.functional.value import clipped_value_loss, return_moments, value_loss


@dataclass(frozen=True)
class PPOLossFn:
    """`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` per token, `r = exp(cur - prev)`.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7.

    Example:
        >>> import torch
        >>> batch = {
        ...     "token_mask": torch.tensor([[1, 1]]),
        ...     "sample_mask": torch.tensor([1]),
        ...     "advantages": torch.tensor([[2.0, 4.0]]),
        ...     "prev_logprobs": torch.tensor([[-1.0, -1.0]]),
        ... }
        >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
        >>> logprobs = torch.tensor([[-1.0, 0.0]])  # ratios 1 and e, the second clipped to 1.2
        >>> PPOLossFn()(logprobs, batch, global_valid_seqs=one, global_valid_tokens=two)[0]
        tensor(-3.4000)
    """

    config: ClippedSurrogate = field(default_factory=ClippedSurrogate)

    columns: ClassVar = ("advantages", "prev_logprobs")
    """Columns that the loss reads, in addition to the masks."""

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: Mapping[str, Tensor],
        *,
        global_valid_seqs: Tensor,
        global_valid_tokens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch and metrics; see `LossFunction` for shapes.

        The batch also has `advantages` and `prev_logprobs`, `[B, T-1]` each. Metrics are means over
        tokens; `policy_kl` is k3 of `KL(prev || cur)`.
        """
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        current = zero_masked(next_token_logprobs, mask)
        previous = zero_masked(batch["prev_logprobs"], mask)
        advantages = zero_masked(batch["advantages"], mask)
        low, high = self.config.clip_low, self.config.clip_high
        ratio = token_ratio(current, previous)
        values = clipped_surrogate(ratio, advantages, clip_low=low, clip_high=high)
        loss = masked_sum(values, mask, denominator=global_valid_tokens)
        # A clip counts if it is active, i.e. removes the token's gradient.
        per_token = {
            "loss": values,
            "policy_kl": kl_estimate(previous, current, kind="k3"),
            "ratio_mean": ratio,
            "approx_entropy": -current,
            "clip_fraction_low": ((ratio < 1 - low) & (advantages < 0)).to(ratio.dtype),
            "clip_fraction_high": ((ratio > 1 + high) & (advantages > 0)).to(ratio.dtype),
        }
        return loss, masked_sums(per_token, mask, denominator=global_valid_tokens)


@dataclass(frozen=True)
class ValueLossFn:
    """`0.5 * max((v - R)^2, (clip(v, v_old +- value_clip) - R)^2)`, a mean over tokens.

    Attributes:
        value_clip: Maximum change of a value in an update, in units of reward; None for no limit.

    Example:
        >>> import torch
        >>> batch = {
        ...     "token_mask": torch.tensor([[1]]),
        ...     "sample_mask": torch.tensor([1]),
        ...     "returns": torch.tensor([[1.0]]),
        ...     "old_values": torch.tensor([[0.0]]),
        ... }
        >>> one, values = torch.tensor(1.0), torch.tensor([[1.0, 9.0]])  # clipped to 0.2
        >>> ValueLossFn(0.2)(values, batch, global_valid_seqs=one, global_valid_tokens=one)[0]
        tensor(0.3200)
    """

    value_clip: float | None = 0.2

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: Mapping[str, Tensor],
        *,
        global_valid_seqs: Tensor,
        global_valid_tokens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch and metrics; see `LossFunction` for normalization.

        Args:
            next_token_logprobs: `[B, T]` values, not logprobs: a scalar head's value of the prefix
                that ends with each token. Value t belongs to the state in which token t+1 is
                chosen, which is position t of the other columns; the last one is not read.
            batch: `token_mask [B, T-1]`, `sample_mask [B]`, `returns [B, T-1]`, and with a clip
                `old_values [B, T-1]`.

        Returns:
            The loss, and means over tokens: `value_loss`, `value_mean`, `value_clip_fraction`
            (share of active clips) and the inputs of `functional.value.explained_variance`.
        """
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        values = zero_masked(next_token_logprobs[:, :-1], mask)
        returns = zero_masked(batch["returns"], mask)
        plain = value_loss(values, returns)
        losses = plain
        if self.value_clip is not None:
            old_values = zero_masked(batch["old_values"], mask)
            losses = clipped_value_loss(values, returns, old_values, clip=self.value_clip)
        loss = masked_sum(losses, mask, denominator=global_valid_tokens)
        per_token = {
            "value_loss": losses,
            "value_mean": values,
            "value_clip_fraction": (losses > plain).to(losses.dtype),
            **return_moments(values, returns),
        }
        return loss, masked_sums(per_token, mask, denominator=global_valid_tokens)
