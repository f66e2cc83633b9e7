"""The policy-gradient losses of the GRPO family: one callable over the kinds of its config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nemo_rl_core.algorithms.grpo.loss_config import (
    BandImportance,
    BuiltinLoss,
    CISPOLoss,
    ClippedLoss,
    ConstantDenominator,
    GSPOLoss,
    ImportanceConfig,
    KLInLoss,
    OnPolicyLoss,
    ReinforceLoss,
    SAPOLoss,
    SequenceMaskImportance,
    TruncatedImportance,
)
from nemo_rl_core.functional.kl import kl_estimate, kl_penalty
from nemo_rl_core.functional.masked import (
    masked_sequence_mean,
    masked_sum,
    masked_sums,
    valid_token_mask,
    zero_masked,
)
from nemo_rl_core.functional.policy_gradient import (
    band_weight,
    cispo,
    clipped_surrogate,
    importance_weight,
    reinforce,
    sampled_entropy,
    sapo,
    sequence_importance_weight,
    sequence_mask_weight,
    sequence_ratio,
    token_ratio,
    truncated_weight,
)


@dataclass(frozen=True)
class GRPOLossFn:
    """`w L + v (beta KL - entropy_bonus H)` at each token, reduced as configured.

    L is the loss of the config's kind (`functional/policy_gradient.py` has the definitions and
    their papers), w the correction for the engine's logprobs, KL the divergence from the reference.
    `v = w r`, with the probability ratio r and no gradient, corrects KL and entropy for samples of
    older weights; with `weighted_terms: policy`, v is 1.

    Attributes:
        config: Kind and options.
        prev_is_current: Whether `prev_logprobs` are the logprobs of the forward pass instead of a
            column, as in the first optimizer step on samples.

    Example:
        >>> loss_fn = GRPOLossFn(ClippedLoss(kl=None))
        >>> batch = {
        ...     "token_mask": torch.tensor([[1, 1]]),
        ...     "sample_mask": torch.tensor([1]),
        ...     "advantages": torch.tensor([[2.0, 2.0]]),
        ...     "prev_logprobs": torch.tensor([[-1.0, -1.0]]),
        ... }
        >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
        >>> logprobs = torch.tensor([[-1.0, 0.0]])  # ratios 1 and e, the second clipped to 1.2
        >>> loss_fn(logprobs, batch, global_valid_seqs=one, global_valid_tokens=two)[0]
        tensor(-2.2000)
    """

    config: BuiltinLoss = field(default_factory=ClippedLoss)
    prev_is_current: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the loss reads, in addition to the masks."""
        config = self.config
        return (
            "advantages",
            *(() if self._takes_current else ("prev_logprobs",)),
            *(("reference_logprobs",) if config.kl is not None else ()),
            *(("generation_logprobs",) if config.importance is not None else ()),
        )

    @property
    def _takes_current(self) -> bool:
        return self.prev_is_current or isinstance(self.config, OnPolicyLoss)

    @property
    def sequence_means(self) -> frozenset[str]:
        """Metrics that are means over sequences; all others are means over tokens."""
        return frozenset() if self.config.reduction == "token_mean" else frozenset({"loss"})

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: Mapping[str, Tensor],
        *,
        global_valid_seqs: Tensor,
        global_valid_tokens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch and metrics; see `LossFunction` for shapes.

        Args:
            next_token_logprobs: `[B, T-1]`.
            batch: `token_mask [B, T-1]`, `sample_mask [B]`, `advantages [B, T-1]`, and `[B, T-1]`
                each: `prev_logprobs` (unless they are the current ones), `reference_logprobs` with
                a KL penalty, `generation_logprobs` with an importance correction.
            global_valid_seqs: 0-dim `Z_seq`.
            global_valid_tokens: 0-dim `Z_tok`.

        Returns:
            The loss, and the metrics `loss` (reduced as configured) and, per token: `policy_kl` (k3
            of `KL(prev || cur)`), `ratio_mean`, `approx_entropy` (`-v cur`); for kinds with a clip
            the shares of active clips; with a penalty `kl` (to the reference, times v and without
            beta); with a correction `importance_weight` and `importance_cut_fraction`, the share of
            weights that it changed. Without a correction w is 1, and `kl` and `approx_entropy` are
            biased where the engine's weights differ from those at the start of the step.
        """
        config, mask = self.config, valid_token_mask(batch["token_mask"], batch["sample_mask"])
        current = zero_masked(next_token_logprobs, mask)
        fixed = current.detach()
        previous = fixed if self._takes_current else zero_masked(batch["prev_logprobs"], mask)
        advantages = zero_masked(batch["advantages"], mask)
        ratio = (
            sequence_ratio(current, previous, mask)
            if isinstance(config, GSPOLoss)
            else token_ratio(current, previous)
        )
        weight, per_token = _importance(config, batch, previous, mask)
        values = weight * _policy_loss(config, current, ratio, advantages)
        # Trained policy over sampling policy: prev / gen as corrected, times cur / prev.
        is_weighted = config.weighted_terms == "all"
        on_policy = weight * ratio.detach() if is_weighted else torch.ones_like(weight)
        per_token |= _clip_fractions(config, ratio.detach(), advantages)
        per_token |= {
            "policy_kl": kl_estimate(previous, fixed, kind="k3"),
            "ratio_mean": ratio.detach(),
            "approx_entropy": -on_policy * fixed,
        }
        if config.kl is not None:
            reference = zero_masked(batch["reference_logprobs"], mask)
            per_token["kl"] = on_policy * kl_estimate(fixed, reference, kind=config.kl.kind)
            if isinstance(config.kl, KLInLoss):
                penalty = kl_penalty(current, reference, kind=config.kl.kind)
                values = values + on_policy * (config.kl.beta * penalty)
        if config.entropy_bonus:
            values = values - on_policy * (config.entropy_bonus * sampled_entropy(current))

        loss = _reduced(
            config.reduction, values, mask, batch, global_valid_seqs, global_valid_tokens
        )
        metrics = masked_sums(per_token, mask, denominator=global_valid_tokens)
        return loss, {"loss": loss.detach(), **metrics}


def _policy_loss(config: BuiltinLoss, current: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    """Returns the loss of each token, `[B, T-1]`, before corrections and means."""
    match config:
        case ClippedLoss(clip_low=low, clip_high=high, dual_clip=dual):
            return clipped_surrogate(
                ratio, advantages, clip_low=low, clip_high=high, dual_clip=dual
            )
        case GSPOLoss(clip_low=low, clip_high=high):
            return clipped_surrogate(ratio, advantages, clip_low=low, clip_high=high)
        case CISPOLoss(clip_low=low, clip_high=high):
            return cispo(current, ratio, advantages, clip_low=low, clip_high=high)
        case ReinforceLoss():
            return reinforce(current, advantages)
        case OnPolicyLoss():
            return -advantages * ratio
        case SAPOLoss(tau_positive=positive, tau_negative=negative):
            return sapo(ratio, advantages, tau_positive=positive, tau_negative=negative)


def _reduced(
    reduction: Literal["token_mean", "sequence_mean"] | ConstantDenominator,
    values: Tensor,
    mask: Tensor,
    batch: Mapping[str, Tensor],
    num_sequences: Tensor,
    num_tokens: Tensor,
) -> Tensor:
    """Reduces a micro-batch; the sum over all micro-batches is the loss of the step."""
    match reduction:
        case "token_mean":
            return masked_sum(values, mask, denominator=num_tokens)
        case "sequence_mean":
            means = masked_sequence_mean(values, mask)
            if "sequence_weights" in batch:
                means = means * batch["sequence_weights"]
            return masked_sum(means, batch["sample_mask"].bool(), denominator=num_sequences)
        case ConstantDenominator(max_tokens=max_tokens):
            return masked_sum(values, mask, denominator=num_sequences * max_tokens)


def _clip_fractions(config: BuiltinLoss, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Returns `[B, T-1]` of 0 and 1, 1 where a clip is active; empty without a clip."""
    if not isinstance(config, ClippedLoss | GSPOLoss | CISPOLoss):
        return {}
    low, high = ratio < 1 - config.clip_low, ratio > 1 + config.clip_high
    active = {"clip_fraction_low": low, "clip_fraction_high": high}
    if not isinstance(config, CISPOLoss):
        # A surrogate's clip is active where it removes the gradient: below the band only for
        # negative advantages, above it only for positive ones. CISPO's clip bounds the weight for
        # both.
        active = {
            "clip_fraction_low": low & (advantages < 0),
            "clip_fraction_high": high & (advantages > 0),
        }
    if isinstance(config, ClippedLoss) and config.dual_clip is not None:
        active["clip_fraction_dual"] = (ratio > config.dual_clip) & (advantages < 0)
    return {name: value.to(ratio.dtype) for name, value in active.items()}


def _importance(
    config: BuiltinLoss, batch: Mapping[str, Tensor], previous: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns weights `[B, T-1]` that correct for the engine's logprobs, and their metrics.

    GSPO has one ratio per sequence and therefore one weight, the geometric mean.
    """
    if config.importance is None:
        return torch.ones_like(previous), {}
    generation = zero_masked(batch["generation_logprobs"], mask)
    by_sequence = sequence_importance_weight(generation, previous, mask)
    raw = by_sequence
    if not isinstance(config, GSPOLoss):
        raw = importance_weight(generation, previous)
    weight = _corrected(config.importance, raw, by_sequence)
    # A weight of 0 counts as a cut even if it was 0 before, since it was not finite.
    is_cut = (weight != raw) | (weight == 0)
    return weight, {"importance_weight": weight, "importance_cut_fraction": is_cut.to(raw.dtype)}


def _corrected(config: ImportanceConfig, weight: Tensor, by_sequence: Tensor) -> Tensor:
    match config:
        case TruncatedImportance(cap=cap):
            return truncated_weight(weight, cap=cap)
        case BandImportance(low=low, high=high):
            return band_weight(weight, low=low, high=high)
        case SequenceMaskImportance(low=low, high=high):
            return sequence_mask_weight(weight, by_sequence, low=low, high=high)
