"""The layout of a planned micro-batch: its tokens in rows, and the row and column of each.

A worker lays out the tokens; the plan (`plan.py`, `ranks.py`) needs lengths alone.
"""

from dataclasses import dataclass

import torch

from nemo_rl_core.distributed.packing.plan import Microbatch


@dataclass(frozen=True)
class PackedRows:
    """Tokens of a micro-batch in rows of equal length.

    Attributes:
        input_ids: `[R, L]`; filler has id 0.
        position_ids: `[R, L]`; restart at 0 with each sequence, and with the filler at a row's end,
            so that models that derive sequence boundaries from them separate filler too.
        row: `[B, T]` row of each token of the padded view, and
        column: `[B, T]` column of each token; both are 0 at padding.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor


def pack(input_ids: torch.Tensor, lengths: torch.Tensor, microbatch: Microbatch) -> PackedRows:
    """Lays the sequences of a micro-batch into its rows.

    Args:
        input_ids: `[B, T]` of the micro-batch's sequences in `microbatch.indices` order, padded
            on the right.
        lengths: `[B]` valid tokens of each.
        microbatch: Its plan.
    """
    num_rows, row_length = len(microbatch.rows), microbatch.row_length
    device = input_ids.device
    counts = torch.tensor([len(row) for row in microbatch.rows], device=device)
    row_of = torch.repeat_interleave(torch.arange(num_rows, device=device), counts)
    ends = torch.cumsum(lengths, 0)
    row_starts = torch.cumsum(counts, 0) - counts
    before_row = torch.cat([ends.new_zeros(1), ends])[row_starts]
    start = ends - lengths - before_row[row_of]

    positions = torch.arange(input_ids.shape[1], device=device)
    valid = positions < lengths[:, None]
    row = torch.where(valid, row_of[:, None], 0)
    column = torch.where(valid, start[:, None] + positions, 0)

    packed_ids = torch.zeros(num_rows, row_length, dtype=input_ids.dtype, device=device)
    used = torch.zeros(num_rows, dtype=torch.long, device=device).index_add_(0, row_of, lengths)
    # Filler counts from 0 after the last sequence of its row.
    packed_positions = torch.arange(row_length, device=device) - used[:, None]
    packed_ids[row[valid], column[valid]] = input_ids[valid]
    packed_positions[row[valid], column[valid]] = positions.expand_as(row)[valid]
    return PackedRows(packed_ids, packed_positions, row, column)
