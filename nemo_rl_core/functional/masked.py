"""Sums and means over the valid entries of a tensor.

All functions select with `torch.where` instead of multiplying by a mask: `0 * nan` is `nan`, in the
value and in the gradient. Gradients are safe only after `zero_masked`, so a loss applies it to its
inputs, before any function whose derivative could be infinite.
"""

import torch
from torch import Tensor


def valid_token_mask(token_mask: Tensor, sample_mask: Tensor) -> Tensor:
    """The mask of valid tokens: `token_mask * sample_mask`.

    Args:
        token_mask: `[B, T-1]`, any dtype; nonzero where the predicted token is trained on.
        sample_mask: `[B]`, any dtype; nonzero where the sequence is.

    Returns:
        `[B, T-1]` bool.
    """
    return token_mask.bool() & sample_mask.bool()[:, None]


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 at the invalid entries, which also get a gradient of exactly 0.

    Args:
        values: Any shape; arbitrary at invalid entries.
        mask: Bool, the shape of `values`.
    """
    assert values.shape == mask.shape, f"values {values.shape} and mask {mask.shape} differ"
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, *, denominator: Tensor) -> Tensor:
    """The sum of the valid entries, divided by a count that may span more than this tensor.

    Args:
        values: Any shape.
        mask: Bool, the shape of `values`.
        denominator: 0-dim count of valid entries of the whole step. A count of 0 gives 0, not NaN.

    Returns:
        0-dim.
    """
    return zero_masked(values, mask).sum() / denominator.clamp(min=1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of the valid entries of this tensor; 0 if there are none.

    Args:
        values: Any shape.
        mask: Bool, the shape of `values`.

    Returns:
        0-dim.
    """
    return masked_sum(values, mask, denominator=mask.sum())


def masked_sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each row over its valid tokens; 0 for rows without any.

    Args:
        values: `[B, T-1]`.
        mask: `[B, T-1]` bool.

    Returns:
        `[B]`.
    """
    return zero_masked(values, mask).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)
