"""The Bradley-Terry loss of a reward model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_rl_core.algorithms.reward_model.config import BradleyTerryLoss
from nemo_rl_core.functional.masked import masked_sum, masked_sums, zero_masked
from nemo_rl_core.functional.preference import pair_rows, sigmoid_loss


@dataclass(frozen=True)
class PreferenceLossFn:
    """`-log sigmoid(s_c - s_r - margin)`, a mean over pairs, on the scores of full sequences.

    Sources: Bradley and Terry 1952, as in InstructGPT, arXiv:2203.02155, section 3.5; the margin,
    Llama 2, arXiv:2307.09288, section 3.2.2.

    Example:
        >>> batch = {
        ...     "input_lengths": torch.tensor([2, 1]),
        ...     "sample_mask": torch.ones(2),
        ...     "pair_ids": torch.tensor([0, 0]),
        ...     "is_chosen": torch.tensor([False, True]),
        ... }
        >>> two, scores = torch.tensor(2.0), torch.tensor([[9.0, 1.0], [1.0, 9.0]])
        >>> loss_fn = PreferenceLossFn()  # the last tokens' scores are 1 and 1
        >>> loss_fn(scores, batch, global_valid_seqs=two, global_valid_tokens=two)[0]
        tensor(0.6931)
    """

    config: BradleyTerryLoss = field(default_factory=BradleyTerryLoss)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: Mapping[str, Tensor],
        *,
        global_valid_seqs: Tensor,
        global_valid_tokens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch and metrics; see `LossFunction` for normalization.

        The loss is NaN if rows of one id are not one chosen and one rejected sequence. Metrics are
        means over pairs.

        Args:
            next_token_logprobs: `[B, T]` scores, not logprobs: a scalar head's value of the prefix
                that ends with each token. A sequence's score is the value at its last token.
            batch: `input_lengths [B]`, `sample_mask [B]` (equal within a pair), `pair_ids [B]`,
                `is_chosen [B]` and optionally `margins [B]` (the chosen row's is read).
            global_valid_seqs: 0-dim `Z_seq`: twice the pairs of the step.
        """
        scores = last_token_scores(next_token_logprobs, batch["input_lengths"])
        scores = zero_masked(scores, batch["sample_mask"].bool())
        chosen, rejected, is_pair = pair_rows(batch["pair_ids"], batch["is_chosen"])
        is_valid = batch["sample_mask"].bool()[chosen]
        num_pairs = global_valid_seqs / 2
        differences = scores[chosen] - scores[rejected]
        targets = batch["margins"][chosen] if "margins" in batch else torch.zeros_like(differences)
        values = sigmoid_loss(differences - zero_masked(targets, is_valid))
        squared_sums = (scores[chosen] + scores[rejected]).square()
        values = values + self.config.centering_coefficient * squared_sums
        # Comparing sequences of different pairs would silently train on noise.
        values = torch.where(is_pair, values, torch.nan)
        loss = masked_sum(values, is_valid, denominator=num_pairs)
        per_pair = {
            "loss": values,
            "accuracy": (differences > 0).to(differences.dtype),
            "margin": differences,
            "chosen_score": scores[chosen],
            "rejected_score": scores[rejected],
        }
        return loss, masked_sums(per_pair, is_valid, denominator=num_pairs)


def last_token_scores(scores: Tensor, input_lengths: Tensor) -> Tensor:
    """Returns the score at the last token of each sequence, `[B]` of `[B, T]`."""
    return scores.gather(1, (input_lengths - 1)[:, None]).squeeze(1)
