"""A micro-batch as the decoder reads it: made on the host, and moved with its columns."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_core.backends.training.context_parallel import own_part
from nemo_rl_core.backends.training.packed_attention import segments_of
from nemo_rl_core.backends.training.padded import Places, places_of
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import Microbatch, PackedRows, pack


@dataclass(frozen=True)
class PackedTokens:
    """Packed rows, and the N tokens of the padded view whose outputs are wanted.

    What has a size that depends on values (which tokens are trained on, where sequences begin) is
    computed where the values are: a GPU would have to be waited for.

    Attributes:
        input_ids: `[R, L]`, and
        position_ids: `[R, L]`, and
        last: `[R, L]`, as `PackedRows` has them.
        wanted_row: `[N]` row of each wanted token in the padded view, and
        wanted_position: `[N]` its position there.
        row: `[n]` packed row of the wanted tokens that this rank has, and
        column: `[n]` their column, counted from the first of this rank.
        own: `[n]` their numbers among the N; None where this rank has all of them.
        boundaries: `[S + 1]` int32 where sequences begin, for kernels that take it; else None.
        longest: Tokens of the longest sequence; 0 without boundaries.
        is_tree: Whether sequences share prefixes.
        sequence_ids: `[R, L]` sequence of each token, B for filler; None if nothing reads it.
    """

    input_ids: Tensor
    position_ids: Tensor
    last: Tensor
    wanted_row: Tensor
    wanted_position: Tensor
    row: Tensor
    column: Tensor
    own: Tensor | None = None
    boundaries: Tensor | None = None
    longest: int = 0
    is_tree: bool = False
    sequence_ids: Tensor | None = None

    @property
    def wanted(self) -> Places:
        """The places of the wanted tokens in the padded view."""
        return self.wanted_row, self.wanted_position

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by attribute."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def moved_with(
        self, batch: BatchedDataDict, device: torch.device
    ) -> tuple[BatchedDataDict, Self]:
        """The columns of a micro-batch and these tensors on a device, in one copy."""
        mine = self.tensors()
        moved, others = batch.moved_with(list(mine.values()), device)
        there: dict[str, Any] = dict(zip(mine, others, strict=True))
        return moved, replace(self, **there)


def packed_tokens(
    batch: BatchedDataDict,
    microbatch: Microbatch,
    wanted: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    with_boundaries: bool = False,
    with_sequence_ids: bool = False,
) -> PackedTokens:
    """Packs the sequences of a micro-batch.

    Args:
        batch: `input_ids [B, T]` and `input_lengths [B]`, in the order of the plan.
        microbatch: The plan; its rows divide by the ranks of `group`.
        wanted: `[B, T]` or `[B, T-1]` bool, set for tokens whose outputs are wanted.
        group: Ranks that split each row; None where each has all of it.
        with_boundaries: Whether attention takes the boundaries of sequences.
        with_sequence_ids: Whether the load-balancing loss reads the sequence of each token.
    """
    rows = pack(batch["input_ids"], batch["input_lengths"], microbatch)
    places = places_of(wanted)
    row, column = rows.row[places], rows.column[places]
    own = None
    if group is not None:
        mine = own_part(torch.arange(microbatch.row_length), group, dim=0)
        first, last = int(mine[0]), int(mine[-1])
        (own,) = ((column >= first) & (column <= last)).nonzero(as_tuple=True)
        row, column = row[own], column[own] - first
    segments = segments_of(rows.position_ids) if with_boundaries else None
    return PackedTokens(
        rows.input_ids,
        rows.position_ids,
        rows.last,
        *places,
        row=row,
        column=column,
        own=own,
        boundaries=segments.boundaries if segments else None,
        longest=segments.longest if segments else 0,
        is_tree=bool(microbatch.shared),
        sequence_ids=_sequence_ids(batch, rows) if with_sequence_ids else None,
    )


def _sequence_ids(batch: BatchedDataDict, rows: PackedRows) -> Tensor:
    lengths, ids = batch["input_lengths"], torch.full_like(rows.input_ids, batch.size)
    sequence, position = places_of(torch.arange(rows.row.shape[1]) < lengths[:, None])
    ids[rows.row[sequence, position], rows.column[sequence, position]] = sequence
    return ids
