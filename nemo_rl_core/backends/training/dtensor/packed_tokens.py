"""Packed micro-batches: created on the host and moved to the device with their columns."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_core.backends.training.context_parallel import rank_part
from nemo_rl_core.backends.training.packed_attention import segments_of
from nemo_rl_core.backends.training.padded import Positions, TensorFields, positions_of
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import Microbatch, PackedRows, pack


@dataclass(frozen=True)
class PackedTokens(TensorFields):
    """Packed rows, and the N selected tokens of the padded view, whose outputs are read.

    Tensors whose sizes depend on values (selected tokens, sequence boundaries) are computed on the
    host, since the host would otherwise have to wait for the GPU.

    Attributes:
        input_ids: `[R, L]` token ids of `PackedRows`.
        last: `[R, L]` last column that attends to each token, of `PackedRows`.
        selected_row: `[N]` row of each selected token in the padded view.
        selected_position: `[N]` position of each selected token in the padded view.
        row: `[n]` packed row of the selected tokens that this rank has.
        column: `[n]` packed column of these tokens, counted from this rank's first column.
        local: `[n]` indices of these tokens among the N; None if this rank has all of them.
        boundaries: `[S + 1]` int32 sequence boundaries, for kernels that need them; else None.
        longest: Tokens of the longest sequence; 0 without boundaries.
        is_tree: Whether sequences share prefixes.
        sequence_ids: `[R, L]` sequence of each token, B for filler; None if nothing reads it.
    """

    input_ids: Tensor
    position_ids: Tensor
    last: Tensor
    selected_row: Tensor
    selected_position: Tensor
    row: Tensor
    column: Tensor
    local: Tensor | None = None
    boundaries: Tensor | None = None
    longest: int = 0
    is_tree: bool = False
    sequence_ids: Tensor | None = None

    @property
    def selected(self) -> Positions:
        """Positions of the selected tokens in the padded view."""
        return self.selected_row, self.selected_position


def packed_tokens(
    batch: BatchedDataDict,
    microbatch: Microbatch,
    selected: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    with_boundaries: bool = False,
    with_sequence_ids: bool = False,
) -> PackedTokens:
    """Packs the sequences of a micro-batch; `group` are the ranks that split each row, if any."""
    rows = pack(batch["input_ids"], batch["input_lengths"], microbatch)
    positions = positions_of(selected)
    row, column = rows.row[positions], rows.column[positions]
    local = None
    if group is not None:
        columns = rank_part(torch.arange(microbatch.row_length), group, dim=0)
        first, last = int(columns[0]), int(columns[-1])
        (local,) = ((column >= first) & (column <= last)).nonzero(as_tuple=True)
        row, column = row[local], column[local] - first
    segments = segments_of(rows.position_ids) if with_boundaries else None
    return PackedTokens(
        rows.input_ids,
        rows.position_ids,
        rows.last,
        *positions,
        row=row,
        column=column,
        local=local,
        boundaries=segments.boundaries if segments else None,
        longest=segments.longest if segments else 0,
        is_tree=bool(microbatch.shared),
        sequence_ids=_sequence_ids(batch, rows) if with_sequence_ids else None,
    )


def _sequence_ids(batch: BatchedDataDict, rows: PackedRows) -> Tensor:
    lengths, ids = batch["input_lengths"], torch.full_like(rows.input_ids, batch.size)
    sequence, position = positions_of(torch.arange(rows.row.shape[1]) < lengths[:, None])
    ids[rows.row[sequence, position], rows.column[sequence, position]] = sequence
    return ids
