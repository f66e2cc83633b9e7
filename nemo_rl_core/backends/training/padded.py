"""Conversion between padded views `[B, T]` and flat tokens `[N]`."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict


def next_tokens(batch: BatchedDataDict) -> torch.Tensor:
    """Returns `[B, T-1, 1]` ids of the next tokens."""
    tokens: torch.Tensor = batch["input_ids"][:, 1:, None]
    return tokens


def target_positions(batch: BatchedDataDict) -> torch.Tensor:
    """Returns the `[B, T-1]` token mask without positions that have no next token."""
    mask: torch.Tensor = batch["token_mask"].bool()
    positions = torch.arange(mask.shape[1], device=mask.device)
    has_next: torch.Tensor = positions < batch["input_lengths"][:, None] - 1
    return mask & has_next


def valid_tokens(batch: BatchedDataDict) -> torch.Tensor:
    """Returns a `[B, T]` bool mask of tokens before the padding."""
    ids, lengths = batch["input_ids"], batch["input_lengths"]
    valid: torch.Tensor = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return valid


Positions = tuple[torch.Tensor, torch.Tensor]
"""`[N]` rows and `[N]` columns of N tokens in a padded view."""


def positions_of(mask: torch.Tensor) -> Positions:
    """Returns the N set positions of `mask [B, T]`, row by row.

    On a GPU, every use of a mask as an index waits for their number; this waits once.
    """
    rows, columns = mask.nonzero().unbind(1)
    return rows, columns


def scatter(values: torch.Tensor, positions: Positions, shape: torch.Size) -> torch.Tensor:
    """Puts `values [N, ...]` at N positions of a padded view `[B, T, ...]`; 0 elsewhere."""
    return values.new_zeros(*shape, *values.shape[1:]).index_put(positions, values)


@dataclass(frozen=True)
class TensorFields:
    """Base of dataclasses of tensors that move to a device with their micro-batch."""

    def moved_with(
        self, batch: BatchedDataDict, device: torch.device
    ) -> tuple[BatchedDataDict, Self]:
        """Moves the columns of a micro-batch and these tensors to a device, in one copy."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved_batch, moved_values = batch.moved_with(values, device)
        return moved_batch, replace(self, **moved_values)


def loss_inputs(
    batch: BatchedDataDict, logprobs_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, BatchedDataDict]:
    """Returns `[B, T-1]` logprobs of next tokens and the batch for the loss.

    If the batch has `topk_ids [B, T-1, K]`, their logprobs are added to it as
    `current_topk_logprobs [B, T-1, K]`. They are computed together, so that each chunk of logits is
    computed once.
    """
    if "topk_ids" not in batch:
        return logprobs_of(next_tokens(batch))[..., 0], batch
    logprobs = logprobs_of(torch.cat([next_tokens(batch), batch["topk_ids"]], dim=-1))
    current = {"current_topk_logprobs": logprobs[..., 1:]}
    return logprobs[..., 0], BatchedDataDict({**batch, **current})


def cropped(part: BatchedDataDict, width: int) -> BatchedDataDict:
    """Removes columns that are padding in all sequences of the batch.

    Tensors as wide as `input_ids [B, T]` keep `width` positions, those of `[B, T-1, ...]` one
    fewer; tensors of other widths are unchanged.
    """
    padded = part["input_ids"].shape[1]
    widths = {padded: width, padded - 1: width - 1}
    columns = dict(part)
    for name, value in part.items():
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            columns[name] = value[:, : widths.get(value.shape[1])]
    return type(part)(columns)
