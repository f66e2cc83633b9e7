"""Micro-batches of a rank: their plans, and their packed tokens.

They are created on the host and moved to the device with their columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_core.backends.training.context_parallel import rank_part
from nemo_rl_core.backends.training.dtensor.mesh import RankMesh
from nemo_rl_core.backends.training.packed_attention import segments_of
from nemo_rl_core.backends.training.padded import (
    Positions,
    TensorFields,
    cropped,
    positions_of,
    valid_tokens,
)
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import (
    Microbatch,
    PackedRows,
    agreed_plan,
    pack,
    plan_microbatches,
)
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.distributed.packing.ranks import plan_shard
from nemo_rl_core.errors import DataError


@dataclass(frozen=True)
class PackedTokens(TensorFields):
    """Packed rows, and the N selected tokens of the padded view, whose outputs are read.

    Tensors whose sizes depend on values (selected tokens, sequence boundaries) are computed on the
    host, since the host would otherwise have to wait for the GPU.

    Attributes:
        input_ids: `[R, L]` token ids of `PackedRows`.
        last: `[R, L]` last column that attends to each token, of `PackedRows`.
        selected: Positions of the N selected tokens in the padded view.
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
    selected: Positions
    row: Tensor
    column: Tensor
    local: Tensor | None = None
    boundaries: Tensor | None = None
    longest: int = 0
    is_tree: bool = False
    sequence_ids: Tensor | None = None


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
        positions,
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


Packs = Callable[[BatchedDataDict, Microbatch], PackedTokens]
"""Function that packs the tokens of a micro-batch."""
_PlanKey = tuple[bytes, tuple[int, ...] | None, bool, PrefixSharing | None]


@dataclass(frozen=True)
class MicrobatchPart:
    """One micro-batch of a shard.

    Attributes:
        is_filler: Whether it is only computed to join the collectives of other data ranks.
        is_last: Whether no data rank has another micro-batch.
    """

    batch: BatchedDataDict
    plan: Microbatch
    packed: PackedTokens
    is_filler: bool = False
    is_last: bool = False


class Microbatches:
    """Plans micro-batches and caches the last plan."""

    def __init__(self, max_tokens: int, mesh: RankMesh | None) -> None:
        self._max_tokens, self._mesh = max_tokens, mesh
        self._plans: dict[_PlanKey, list[Microbatch]] = {}

    def split(
        self,
        batch: BatchedDataDict,
        *,
        share_rows: bool,
        device: torch.device,
        sharing: PrefixSharing | None = None,
        independent_length: int | None = None,
        packed: Packs | None = None,
    ) -> Iterator[MicrobatchPart]:
        """Yields the micro-batches of a shard, on a device.

        A rank then yields fillers, sequences of two masked tokens, until all data ranks have the
        same number of micro-batches.

        Args:
            batch: `input_ids [B, T]`, `input_lengths [B]`, optionally `pair_ids [B]` that keep rows
                together; B may be 0. The batch's plan is used if it has one, unless it packs rows
                or shares prefixes and this model cannot.
        """

        rank_plan = partial(self._plan_of_rank, batch, share_rows, sharing, independent_length)
        largest = int if self._mesh is None else self._mesh.data_max
        plan, most = agreed_plan(rank_plan, largest)
        for index in range(most):
            is_filler = index >= len(plan)
            microbatch = _FILLER if is_filler else plan[index]
            part = _filler() if is_filler else batch.select_indices(microbatch.indices)
            # Cropped on the host: reading the width from the GPU would wait for it.
            part = cropped(part, int(part["input_lengths"].max()))
            tokens = (
                packed(part, microbatch)
                if packed
                else packed_tokens(part, microbatch, valid_tokens(part))
            )
            part, tokens = tokens.moved_with(part, device)
            is_last = index == most - 1
            yield MicrobatchPart(part, microbatch, tokens, is_filler=is_filler, is_last=is_last)

    def _plan_of_rank(
        self,
        batch: BatchedDataDict,
        share_rows: bool,
        sharing: PrefixSharing | None,
        longest: int | None,
    ) -> list[Microbatch]:
        if longest is not None:
            sharing = None
            if max(batch["input_lengths"].tolist(), default=0) > longest:
                return self._with_single(batch, share_rows, longest)
        plan = batch.microbatches
        rows_are_shared = any(len(row) > 1 for part in plan or () for row in part.rows)
        prefixes_are_shared = any(part.shared for part in plan or ())
        if (
            plan is None
            or (rows_are_shared and not share_rows)
            or (prefixes_are_shared and sharing is None)
        ):
            return self._plan(batch, share_rows, sharing)
        return plan

    def _with_single(
        self, batch: BatchedDataDict, share_rows: bool, longest: int
    ) -> list[Microbatch]:
        """Returns a plan with a separate micro-batch for each sequence longer than `longest`."""
        lengths = batch["input_lengths"].tolist()
        single = [row for row, length in enumerate(lengths) if length > longest]
        if "pair_ids" in batch:
            raise DataError(
                "a pair has a sequence that needs a separate micro-batch with this model",
                expected=f"at most {longest} tokens in each sequence of a pair",
                got=f"{max(lengths)} tokens",
                fix="cut these rows or leave them out: data.overlong: truncate or drop with "
                f"data.max_sequence_tokens: {longest}",
            )
        shared_rows = [row for row, length in enumerate(lengths) if length <= longest]
        return [
            part.renumbered(rows)
            for rows in [*([row] for row in single), shared_rows]
            for part in self._plan(batch.select_indices(rows), share_rows, None)
        ]

    def _plan(
        self, batch: BatchedDataDict, share_rows: bool, sharing: PrefixSharing | None
    ) -> list[Microbatch]:
        pairs = tuple(batch["pair_ids"].tolist()) if "pair_ids" in batch else None
        read = ("input_lengths",) if sharing is None else ("input_lengths", "input_ids")
        tokens = blake2b(b"".join(batch[name].numpy().tobytes() for name in read)).digest()
        key = tokens, pairs, share_rows, sharing
        if key not in self._plans:
            # A step plans three times for the same rows: old logprobs, reference, training.
            if sharing is not None and share_rows:
                plan = plan_shard(batch, max_tokens=self._max_tokens, sharing=sharing)
            else:
                plan = plan_microbatches(
                    batch["input_lengths"].tolist(),
                    max_tokens=self._max_tokens,
                    bundles=pairs,
                    share_rows=share_rows,
                )
            self._plans = {key: plan}
        return self._plans[key]


_FILLER = Microbatch(rows=((0,),), row_length=2)


def _filler() -> BatchedDataDict:
    return BatchedDataDict(
        {
            "input_ids": torch.zeros(1, 2, dtype=torch.long),
            "input_lengths": torch.tensor([2]),
            "token_mask": torch.zeros(1, 1, dtype=torch.bool),
        }
    )
