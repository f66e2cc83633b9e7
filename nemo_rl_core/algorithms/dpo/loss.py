"""Preference losses from token logprobs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

import torch
from torch import Tensor

from nemo_rl_core.algorithms.dpo.config import (
    BuiltinPreferenceLoss,
    HingeLoss,
    IPOLoss,
    KTOLoss,
    LengthNormalizedLoss,
    ORPOLoss,
    RobustLoss,
    SFTTerm,
    SigmoidLoss,
    SimPOLoss,
)
from nemo_rl_core.functional.masked import (
    masked_sequence_mean,
    masked_sum,
    masked_sums,
    valid_token_mask,
    zero_masked,
)
from nemo_rl_core.functional.preference import (
    hinge_loss,
    ipo_loss,
    kto_loss,
    log_odds,
    pair_rows,
    robust_loss,
    sigmoid_loss,
)


@dataclass(frozen=True)
class _Sequences:
    """Statistics of sequences, `[B]` each.

    Attributes:
        logprobs: Sum over the tokens, in nats.
        mean_logprobs: Mean over the tokens, in nats; 0 for an empty sequence.
    """

    is_chosen: Tensor
    logprobs: Tensor
    mean_logprobs: Tensor
    rewards: Tensor


@dataclass(frozen=True)
class DPOLossFn:
    """The mean over pairs (KTO: over sequences) of the configured loss.

    A pair's loss is a function of its margin, the chosen sequence's implicit reward less the
    rejected one's. The reward, with `rho = sum_t (cur - ref) * m` and `|y|` a sequence's tokens:
    `beta rho` (sigmoid, hinge, robust, summed IPO, KTO), `beta rho / |y|` (length_normalized, IPO
    per token), `beta sum_t cur / |y|` (SimPO), the log-odds of the mean probability (ORPO). Sources
    are in `functional/preference.py` and `config.py`.

    Example:
        >>> batch = {
        ...     "token_mask": torch.ones(2, 1),
        ...     "sample_mask": torch.ones(2),
        ...     "pair_ids": torch.tensor([0, 0]),
        ...     "is_chosen": torch.tensor([True, False]),
        ...     "reference_logprobs": torch.tensor([[-1.0], [-2.0]]),
        ... }
        >>> two, logprobs = torch.tensor(2.0), torch.tensor([[-1.0], [-2.0]])
        >>> DPOLossFn()(logprobs, batch, global_valid_seqs=two, global_valid_tokens=two)[0]
        tensor(0.6931)
    """

    config: BuiltinPreferenceLoss = field(default_factory=SigmoidLoss)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the loss reads, in addition to the masks."""
        return (
            "is_chosen",
            "pair_ids" if self.config.needs_pairs else "kl_baseline",
            *(("reference_logprobs",) if self.config.needs_reference else ()),
        )

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: Mapping[str, Tensor],
        *,
        global_valid_seqs: Tensor,
        global_valid_tokens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch and metrics; see `LossFunction` for shapes.

        The loss is NaN if rows of one id are not one chosen and one rejected sequence. Metrics are
        means over pairs, with logprobs in nats per token and the unweighted `sft_loss`. For KTO,
        they are means over sequences: `accuracy` is the share on the correct side of the baseline,
        `margin` the signed distance to it.

        Args:
            next_token_logprobs: `[B, T-1]`.
            batch: `token_mask [B, T-1]`, `sample_mask [B]` (equal within a pair), `is_chosen [B]`;
                `pair_ids [B]` for all kinds but KTO, both rows of a pair in this micro-batch;
                `reference_logprobs [B, T-1]` for kinds with a reference; `kl_baseline [B]` for KTO.
            global_valid_seqs: 0-dim `Z_seq`: twice the pairs of the step.
        """
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        current = zero_masked(next_token_logprobs, mask)
        log_ratios = current
        if self.config.needs_reference:
            log_ratios = current - zero_masked(batch["reference_logprobs"], mask)
        sequences = _Sequences(
            is_chosen=batch["is_chosen"].bool(),
            logprobs=current.sum(dim=-1),
            mean_logprobs=masked_sequence_mean(current, mask),
            rewards=_implicit_rewards(self.config, log_ratios, mask),
        )
        if isinstance(self.config, KTOLoss):
            return _unpaired_loss(self.config, sequences, batch, global_valid_seqs)
        return _paired_loss(self.config, sequences, batch, global_valid_seqs / 2)


def _implicit_rewards(config: BuiltinPreferenceLoss, log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Returns `[B]` rewards from `[B, T-1]` log-ratios, or logprobs without a reference."""
    match config:
        case LengthNormalizedLoss() | SimPOLoss() | IPOLoss(per="token"):
            return config.beta * masked_sequence_mean(log_ratios, mask)
        case SigmoidLoss() | HingeLoss() | RobustLoss() | IPOLoss() | KTOLoss():
            return config.beta * log_ratios.sum(dim=-1)
        case ORPOLoss():
            return log_odds(masked_sequence_mean(log_ratios, mask))
        case _:
            assert_never(config)


PairLoss = (
    SigmoidLoss | HingeLoss | IPOLoss | RobustLoss | SimPOLoss | LengthNormalizedLoss | ORPOLoss
)


def _margin_loss(config: PairLoss, margins: Tensor) -> Tensor:
    match config:
        case SigmoidLoss() | LengthNormalizedLoss():
            return sigmoid_loss(margins, label_smoothing=config.label_smoothing)
        case RobustLoss():
            return robust_loss(margins, label_smoothing=config.label_smoothing)
        case HingeLoss():
            return hinge_loss(margins)
        case IPOLoss():
            return ipo_loss(margins / config.beta, beta=config.beta)
        case SimPOLoss():
            return sigmoid_loss(margins - config.gamma)
        case ORPOLoss():
            return config.odds_weight * sigmoid_loss(margins)
        case _:
            assert_never(config)


def _paired_loss(
    config: PairLoss, sequences: _Sequences, batch: Mapping[str, Tensor], num_pairs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    chosen, rejected, is_pair = pair_rows(batch["pair_ids"], sequences.is_chosen)
    is_valid = batch["sample_mask"].bool()[chosen]
    margins = sequences.rewards[chosen] - sequences.rewards[rejected]
    # Comparing sequences of different pairs would silently train on noise.
    values = torch.where(is_pair, _margin_loss(config, margins), torch.nan)
    per_pair = {
        "accuracy": (margins > 0).to(margins.dtype),
        "margin": margins,
        "chosen_reward": sequences.rewards[chosen],
        "rejected_reward": sequences.rewards[rejected],
        "chosen_logprob": sequences.mean_logprobs[chosen],
        "rejected_logprob": sequences.mean_logprobs[rejected],
    }
    sft = SFTTerm() if isinstance(config, ORPOLoss) else config.sft
    if sft is not None:
        sequence_logprobs = sequences.mean_logprobs if sft.per == "token" else sequences.logprobs
        per_pair["sft_loss"] = -sequence_logprobs[chosen]
        values = values + sft.weight * per_pair["sft_loss"]
    return _reduce(values, per_pair, is_valid, num_pairs)


def _unpaired_loss(
    config: KTOLoss, sequences: _Sequences, batch: Mapping[str, Tensor], num_sequences: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    is_valid = batch["sample_mask"].bool()
    baseline = zero_masked(batch["kl_baseline"].detach(), is_valid)
    advantages = sequences.rewards - config.beta * baseline
    values = kto_loss(
        advantages,
        sequences.is_chosen,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
    )
    margins = torch.where(sequences.is_chosen, advantages, -advantages)
    per_sequence = {
        "accuracy": (margins > 0).to(margins.dtype),
        "margin": margins,
        "chosen_fraction": sequences.is_chosen.to(margins.dtype),
        "kl_baseline": baseline,
    }
    return _reduce(values, per_sequence, is_valid, num_sequences)


def _reduce(
    values: Tensor, metrics: Mapping[str, Tensor], is_valid: Tensor, denominator: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = masked_sum(values, is_valid, denominator=denominator)
    means = masked_sums(metrics, is_valid, denominator=denominator)
    return loss, {"loss": loss.detach(), **means}
