"""Packed micro-batches of this rank, created on the host.

Transformer Engine's ring attention splits each sequence into twice as many parts as there are
context ranks; a rank takes one from the front and one from the back, so that causal attention has
equal cost on every rank (Brandon et al. 2023, arXiv:2311.09431). Sequences are padded at their
ends, which no token attends to.
"""

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from nemo_rl_core.backends.training.context_parallel import rank_part
from nemo_rl_core.backends.training.megatron.settings import has_transformer_engine
from nemo_rl_core.backends.training.packed_attention import segments_of
from nemo_rl_core.backends.training.padded import Positions, TensorFields, positions_of
from nemo_rl_core.distributed.packing.plan import PackedRows


@dataclass(frozen=True)
class MegatronRows(TensorFields):
    """Packed rows of one rank, and the N selected tokens of the padded view.

    Outputs of the selected tokens are read. Tensors whose sizes depend on values are computed on
    the host, since the host would otherwise have to wait for the GPU.

    Attributes:
        input_ids: `[R, L / ranks]` ids of this context rank; with Transformer Engine `[1, M]`, all
            rows concatenated.
        position_ids: Positions of the same tokens.
        last: `[R, L]` last column that attends to each token of full rows; see `PackedRows`.
        boundaries: `[S + 1]` int32 sequence boundaries, for kernels that need them.
        selected: Positions of the N selected tokens in the padded view.
        hidden_index: `[n]` indices among this rank's M hidden states of its selected tokens.
        local: `[n]` indices of these tokens among the N; None if this rank has all of them.
    """

    input_ids: Tensor
    position_ids: Tensor
    last: Tensor
    boundaries: Tensor
    longest: int
    num_positions: int
    selected: Positions
    hidden_index: Tensor
    local: Tensor | None


def megatron_rows(rows: PackedRows, selected: Tensor) -> MegatronRows:
    """Returns this rank's part of packed rows; outputs of `selected [B, T]` are read."""
    positions = rank_positions(rows)
    shape = (1, -1) if has_transformer_engine() else (len(rows.position_ids), -1)
    ids, position_ids = (
        part.flatten()[positions].masked_fill(positions < 0, 0).view(shape)
        for part in (rows.input_ids, rows.position_ids)
    )
    if has_transformer_engine():
        # Its kernels restart rope at sequence boundaries and ignore token masks.
        num_ranks, _, num_tensor = _ring()
        boundaries = ring_boundaries(rows.position_ids.flatten(), num_ranks, num_tensor)
        longest = int(boundaries.diff().max())
    else:
        segments = segments_of(rows.position_ids)
        boundaries, longest = segments.boundaries, segments.longest
    selected_positions = positions_of(selected)
    hidden_index, local = _local(rows, selected_positions, positions)
    return MegatronRows(
        ids,
        position_ids,
        rows.last,
        boundaries,
        longest,
        int(rows.position_ids.max()) + 1,
        selected_positions,
        hidden_index=hidden_index,
        local=local,
    )


def _local(
    rows: PackedRows, selected: Positions, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    flat = rows.row[selected] * rows.position_ids.shape[1] + rows.column[selected]
    if parallel_state.get_context_parallel_group().size() == 1:
        return flat, None
    index = flat.new_full((rows.position_ids.numel(),), -1)
    is_token = positions >= 0
    index[positions[is_token]] = is_token.nonzero()[:, 0]
    local = (index[flat] >= 0).nonzero()[:, 0]
    return index[flat[local]], local


def rank_positions(rows: PackedRows) -> Tensor:
    """Returns `[M]` indices of this rank's tokens in the flattened rows `[R L]`; -1 is filler."""
    if has_transformer_engine():
        return ring_positions(rows.position_ids.flatten(), *_ring())
    positions = torch.arange(rows.position_ids.numel(), device=rows.position_ids.device)
    group = parallel_state.get_context_parallel_group()
    return rank_part(positions.view_as(rows.position_ids), group, dim=1).flatten()


def _ring() -> tuple[int, int, int]:
    """Returns the number of context ranks, this rank's index, and the number of tensor ranks."""
    group = parallel_state.get_context_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return group.size(), group.rank(), tensor


def ring_boundaries(position_ids: Tensor, num_ranks: int, num_tensor: int) -> Tensor:
    """Returns `[S + 1]` int32 starts of S padded sequences of a row, and the end of the last."""
    lengths = _sequences(position_ids)[1]
    multiple = _parts(num_ranks) * (num_tensor if num_ranks > 1 else 1)
    filled = (lengths + multiple - 1) // multiple * multiple
    return torch.cat([filled.new_zeros(1), filled.cumsum(0)]).int()


def ring_positions(position_ids: Tensor, num_ranks: int, rank: int, num_tensor: int) -> Tensor:
    """Returns `[M]` indices in the row `[L]` of a rank's tokens; -1 for filler."""
    starts, lengths = _sequences(position_ids)
    borders = ring_boundaries(position_ids, num_ranks, num_tensor).long()
    filled, parts = borders.diff(), _parts(num_ranks)
    # Sequence and offset of every token, filler included.
    sequence = torch.repeat_interleave(filled)
    offset = torch.arange(len(sequence), device=sequence.device) - borders[sequence]
    position = torch.where(offset < lengths[sequence], starts[sequence] + offset, -1)
    part = offset * parts // filled[sequence]
    return position[(part == rank) | (part == parts - 1 - rank)]


def _parts(num_ranks: int) -> int:
    return 2 * num_ranks if num_ranks > 1 else 1


def _sequences(position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `[S]` first indices and `[S]` lengths of the sequences."""
    starts = (position_ids == 0).nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([len(position_ids)])])
    return starts, ends - starts
