"""Plans of a rank's micro-batches, and packing of their tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch

from nemo_rl_core.backends.training.agreed_plan import agreed_plan
from nemo_rl_core.backends.training.dtensor.mesh import RankMesh
from nemo_rl_core.backends.training.dtensor.packed import valid_tokens
from nemo_rl_core.backends.training.dtensor.packed_tokens import PackedTokens, packed_tokens
from nemo_rl_core.backends.training.padded import cropped
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import Microbatch
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.distributed.packing.ranks import plan_shard
from nemo_rl_core.errors import DataError

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
        plan, most = agreed_plan(rank_plan, self._largest)
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

    def _largest(self, count: int) -> int:
        return count if self._mesh is None else self._mesh.data_max(count)

    def _plan(
        self, batch: BatchedDataDict, share_rows: bool, sharing: PrefixSharing | None
    ) -> list[Microbatch]:
        pairs = tuple(batch["pair_ids"].tolist()) if "pair_ids" in batch else None
        read = ("input_lengths",) if sharing is None else ("input_lengths", "input_ids")
        tokens = blake2b(b"".join(batch[name].numpy().tobytes() for name in read)).digest()
        key = tokens, pairs, share_rows, sharing
        if key not in self._plans:
            # A step plans three times for the same rows: old logprobs, reference, training.
            plan = plan_shard(
                batch, max_tokens=self._max_tokens, share_rows=share_rows, sharing=sharing
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
