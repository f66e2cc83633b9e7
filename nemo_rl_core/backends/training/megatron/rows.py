"""A micro-batch as a chunk of the model and its head read it, made on the host."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from megatron.core import parallel_state
from torch import Tensor

from nemo_rl_core.backends.training.context_parallel import own_part
from nemo_rl_core.backends.training.megatron.ring import ring_boundaries, ring_positions
from nemo_rl_core.backends.training.megatron.settings import has_transformer_engine
from nemo_rl_core.backends.training.packed_attention import segments_of
from nemo_rl_core.backends.training.padded import Places, places_of
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import PackedRows


@dataclass(frozen=True)
class MegatronRows:
    """Packed rows of one rank, and the N tokens of the padded view whose outputs are wanted.

    What has a size that depends on values is computed where the values are: a GPU would have to be
    waited for.

    Attributes:
        input_ids: `[R, L / ranks]` ids of this context rank; with Transformer Engine `[1, M]`, all
            rows concatenated.
        position_ids: Of the same tokens.
        last: `[R, L]` of whole rows, as `PackedRows` has it.
        boundaries: `[S + 1]` int32 where sequences begin, for kernels that take it.
        longest: Tokens of the longest sequence.
        num_positions: One more than the largest position.
        wanted_row: `[N]` row of each wanted token in the padded view, and
        wanted_position: `[N]` its position there.
        held: `[n]` indices among this rank's M hidden states of the wanted tokens that it has.
        numbers: `[n]` their numbers among the N; None where this rank has all of them.
    """

    input_ids: Tensor
    position_ids: Tensor
    last: Tensor
    boundaries: Tensor
    longest: int
    num_positions: int
    wanted_row: Tensor
    wanted_position: Tensor
    held: Tensor
    numbers: Tensor | None

    @property
    def wanted(self) -> Places:
        """The places of the wanted tokens in the padded view."""
        return self.wanted_row, self.wanted_position

    def moved_with(
        self, batch: BatchedDataDict, device: torch.device
    ) -> tuple[BatchedDataDict, Self]:
        """The columns of a micro-batch and these tensors on a device, in one copy."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        mine = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        moved, others = batch.moved_with(list(mine.values()), device)
        there: dict[str, Any] = dict(zip(mine, others, strict=True))
        return moved, replace(self, **there)


def megatron_rows(rows: PackedRows, wanted: Tensor) -> MegatronRows:
    """This rank's part of packed rows.

    Args:
        rows: Of a micro-batch.
        wanted: `[B, T]` or `[B, T-1]` bool, set for tokens whose outputs are wanted.
    """
    positions = own_positions(rows)
    shape = (1, -1) if has_transformer_engine() else (len(rows.position_ids), -1)
    ids, position_ids = (
        part.flatten()[positions].masked_fill(positions < 0, 0).view(shape)
        for part in (rows.input_ids, rows.position_ids)
    )
    if has_transformer_engine():
        # Its kernels take sequence boundaries and restart rope at each; they ignore token masks.
        num_ranks, _, num_tensor = _ring()
        boundaries = ring_boundaries(rows.position_ids.flatten(), num_ranks, num_tensor)
        longest = int(boundaries.diff().max())
    else:
        segments = segments_of(rows.position_ids)
        boundaries, longest = segments.boundaries, segments.longest
    places = places_of(wanted)
    held, numbers = _held(rows, places, positions)
    return MegatronRows(
        ids,
        position_ids,
        rows.last,
        boundaries,
        longest,
        int(rows.position_ids.max()) + 1,
        *places,
        held=held,
        numbers=numbers,
    )


def _held(rows: PackedRows, wanted: Places, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """Indices of wanted tokens among those of this rank, and which of the wanted they are."""
    place = rows.row[wanted] * rows.position_ids.shape[1] + rows.column[wanted]
    if parallel_state.get_context_parallel_group().size() == 1:
        return place, None
    index = place.new_full((rows.position_ids.numel(),), -1)
    is_token = positions >= 0
    index[positions[is_token]] = is_token.nonzero()[:, 0]
    numbers = (index[place] >= 0).nonzero()[:, 0]
    return index[place[numbers]], numbers


def own_positions(rows: PackedRows) -> Tensor:
    """`[M]` indices of this rank's positions among the R L positions of the flattened rows.

    -1 stands for filler outside of the rows.
    """
    if has_transformer_engine():
        return ring_positions(rows.position_ids.flatten(), *_ring())
    positions = torch.arange(rows.position_ids.numel(), device=rows.position_ids.device)
    group = parallel_state.get_context_parallel_group()
    return own_part(positions.view_as(rows.position_ids), group, dim=1).flatten()


def _ring() -> tuple[int, int, int]:
    """Number of context ranks, this rank's index among them, and number of tensor ranks."""
    group = parallel_state.get_context_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return group.size(), group.rank(), tensor
