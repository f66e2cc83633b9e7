"""Sums and means over the valid entries of a tensor.

All functions select with `torch.where` instead of multiplying by a mask: `0 * nan` is `nan`, in the
value and in the gradient. Gradients are safe only after `zero_masked`, so a loss applies it to its
inputs, before any function whose derivative could be infinite.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def valid_token_mask(token_mask: Tensor, sample_mask: Tensor) -> Tensor:
    """Returns the bool mask `[B, T-1]` of valid tokens: `token_mask * sample_mask`.

    Args:
        token_mask: `[B, T-1]`, any dtype; nonzero where the predicted token is trained on.
        sample_mask: `[B]`, any dtype; nonzero where the sequence is trained on.
    """
    return token_mask.bool() & sample_mask.bool()[:, None]


def num_trained_sequences(batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the 0-dim number of sequences in the loss; samples of an episode count as one."""
    mask = batch["sample_mask"]
    return (mask * batch["sequence_weights"] if "sequence_weights" in batch else mask).sum()


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Sets entries outside the bool mask, which may be arbitrary, to 0; so is their gradient."""
    assert values.shape == mask.shape, f"values {values.shape} and mask {mask.shape} differ"
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, *, denominator: Tensor) -> Tensor:
    """Sums the valid entries and divides by a count that may span more than this tensor.

    The 0-dim `denominator` counts the valid entries of the full step; a count of 0 gives 0, not
    NaN.
    """
    return zero_masked(values, mask).sum() / denominator.clamp(min=1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the 0-dim mean of the valid entries of this tensor; 0 if there are none."""
    return masked_sum(values, mask, denominator=mask.sum())


def masked_sums(
    values: Mapping[str, Tensor], mask: Tensor, *, denominator: Tensor
) -> dict[str, Tensor]:
    """Returns `masked_sum` of each tensor without its graph, for metrics."""
    return {
        name: masked_sum(each.detach(), mask, denominator=denominator)
        for name, each in values.items()
    }


def masked_sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean of each row over its valid tokens, `[B]`; 0 for rows without any."""
    return zero_masked(values, mask).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)
