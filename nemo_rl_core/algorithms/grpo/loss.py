"""The clipped policy-gradient loss with an optional penalty on leaving the reference policy.

Left out, because no kind of the config asks for it: dual clip, CISPO, GSPO, and the correction for
the engine's own logprobs (`generation_logprobs` is read by the health metrics, not here).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_core.algorithms.grpo.config import ClippedLoss
from nemo_rl_core.functional.kl import kl_estimate, kl_penalty
from nemo_rl_core.functional.masked import (
    masked_sequence_mean,
    masked_sum,
    valid_token_mask,
    zero_masked,
)


@dataclass(frozen=True)
class GRPOLossFn:
    """`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + beta * KL`, with `r = exp(cur - prev)`.

    Sources: the surrogate, PPO (arXiv:1707.06347, equation 7); `token_mean` and the two bounds,
    DAPO (arXiv:2503.14476); `sequence_mean` and the penalty, GRPO (arXiv:2402.03300).

    Example:
        >>> loss_fn = GRPOLossFn(ClippedLoss(kl=None))
        >>> batch = {
        ...     "token_mask": torch.tensor([[1, 1]]),
        ...     "sample_mask": torch.tensor([1]),
        ...     "advantages": torch.tensor([2.0]),
        ...     "prev_logprobs": torch.tensor([[-1.0, -1.0]]),
        ... }
        >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
        >>> logprobs = torch.tensor([[-1.0, 0.0]])  # ratios 1 and e, the second clipped to 1.2
        >>> loss_fn(logprobs, batch, global_valid_seqs=one, global_valid_tokens=two)[0]
        tensor(-2.2000)
    """

    config: ClippedLoss

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: Mapping[str, Tensor],
        *,
        global_valid_seqs: Tensor,
        global_valid_tokens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch; see `LossFunction` for shapes and normalization.

        Args:
            next_token_logprobs: `[B, T-1]`.
            batch: `token_mask [B, T-1]`, `sample_mask [B]`, `advantages [B]`, `prev_logprobs
                [B, T-1]` and, with a KL penalty, `reference_logprobs [B, T-1]`.
            global_valid_seqs: 0-dim `Z_seq`.
            global_valid_tokens: 0-dim `Z_tok`.

        Returns:
            The loss, and the metrics `loss` (reduced as configured) and, a token: `policy_kl`
            (k3 of `KL(prev || cur)`), `ratio_mean`, `approx_entropy`, `clip_fraction_low`,
            `clip_fraction_high` and, with a penalty, `kl` (to the reference, without beta).
        """
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        current = zero_masked(next_token_logprobs, mask)
        previous = zero_masked(batch["prev_logprobs"], mask)
        advantages = zero_masked(batch["advantages"], batch["sample_mask"].bool())[:, None]
        ratio = torch.exp(current - previous)
        values = self._surrogate(ratio, advantages)
        per_token = self._health(current.detach(), previous, ratio.detach(), advantages)

        if self.config.kl is not None:
            kind, beta = self.config.kl.kind, self.config.kl.beta
            reference = zero_masked(batch["reference_logprobs"], mask)
            values = values + beta * kl_penalty(current, reference, kind=kind)
            per_token["kl"] = kl_estimate(current.detach(), reference, kind=kind)

        if self.config.reduction == "token_mean":
            loss = masked_sum(values, mask, denominator=global_valid_tokens)
        else:
            means = masked_sequence_mean(values, mask)
            loss = masked_sum(means, batch["sample_mask"].bool(), denominator=global_valid_seqs)
        metrics = {
            name: masked_sum(metric, mask, denominator=global_valid_tokens)
            for name, metric in per_token.items()
        }
        return loss, {"loss": loss.detach(), **metrics}

    def _surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        clipped = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        return torch.maximum(-advantages * ratio, -advantages * clipped)

    def _health(
        self, current: Tensor, previous: Tensor, ratio: Tensor, advantages: Tensor
    ) -> dict[str, Tensor]:
        # A clip counts where it binds, that is where the token's gradient is gone: below the band
        # only for a negative advantage, above it only for a positive one.
        low = (ratio < 1 - self.config.clip_low) & (advantages < 0)
        high = (ratio > 1 + self.config.clip_high) & (advantages > 0)
        return {
            "policy_kl": kl_estimate(previous, current, kind="k3"),
            "ratio_mean": ratio,
            "approx_entropy": -current,
            "clip_fraction_low": low.to(ratio.dtype),
            "clip_fraction_high": high.to(ratio.dtype),
        }
