"""Conversion between padded views `[B, T]` and flat tokens `[N]`."""

from typing import Any

import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict


def next_tokens(batch: BatchedDataDict) -> torch.Tensor:
    """`[B, T-1, 1]` ids of the next tokens."""
    tokens: torch.Tensor = batch["input_ids"][:, 1:, None]
    return tokens


def wanted_positions(batch: BatchedDataDict) -> torch.Tensor:
    """`[B, T-1]` bool: the mask, without positions that have no next token."""
    mask: torch.Tensor = batch["token_mask"].bool()
    positions = torch.arange(mask.shape[1], device=mask.device)
    has_next: torch.Tensor = positions < batch["input_lengths"][:, None] - 1
    return mask & has_next


Places = tuple[torch.Tensor, torch.Tensor]
"""`[N]` row and `[N]` position of N tokens of a padded view."""


def places_of(wanted: torch.Tensor) -> Places:
    """The N set positions of `wanted [B, T]`, row by row.

    On a GPU, each use of a mask as an index waits for their number; this waits once.
    """
    rows, positions = wanted.nonzero().unbind(1)
    return rows, positions


def scatter(values: torch.Tensor, wanted: Places, shape: torch.Size) -> torch.Tensor:
    """Puts `values [N, ...]` at N places of a padded view `[B, T, ...]`; 0 elsewhere.

    Args:
        values: One a place.
        wanted: The places.
        shape: B and T.
    """
    return values.new_zeros(*shape, *values.shape[1:]).index_put(wanted, values)


def cropped(part: BatchedDataDict, width: int) -> BatchedDataDict:
    """Removes columns that are padding in all sequences of the batch.

    Tensors as wide as `input_ids [B, T]` keep `width` positions, those of `[B, T-1, ...]` one
    fewer; tensors of other widths are unchanged.
    """
    padded = part["input_ids"].shape[1]
    widths = {padded: width, padded - 1: width - 1}

    def crop(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return value[:, : widths.get(value.shape[1])]
        return value

    return type(part)({name: crop(value) for name, value in part.items()})
