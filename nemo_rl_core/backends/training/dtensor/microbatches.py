"""Micro-batches of a rank's rows within the token budget, as many on every data rank."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nemo_rl_core.backends.training.agreed_plan import agreed_plan
from nemo_rl_core.backends.training.dtensor.mesh import RankMesh
from nemo_rl_core.backends.training.padded import cropped
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import Microbatch, plan_microbatches

_PlanKey = tuple[tuple[int, ...], tuple[int, ...] | None, bool]


@dataclass(frozen=True)
class MicrobatchPart:
    """One micro-batch of a shard.

    Attributes:
        batch: Its rows, in the plan's order.
        plan: Indices of the shard's rows, and their packing.
        is_filler: Whether it only serves to join the collectives of other data ranks.
    """

    batch: BatchedDataDict
    plan: Microbatch
    is_filler: bool = False


class Microbatches:
    """Plans micro-batches and caches the last plan.

    Args:
        max_tokens: The budget of one micro-batch, filler included.
        mesh: The ranks, or None for a single rank.
    """

    def __init__(self, max_tokens: int, mesh: RankMesh | None) -> None:
        self._max_tokens, self._mesh = max_tokens, mesh
        self._plans: dict[_PlanKey, list[Microbatch]] = {}

    def of(
        self, batch: BatchedDataDict, *, share_rows: bool, device: torch.device
    ) -> Iterator[MicrobatchPart]:
        """Yields the micro-batches of a shard, on a device.

        After its own, a rank yields fillers until it has as many as the data rank with most: a
        filler is one sequence of two masked tokens.

        Args:
            batch: `input_ids [B, T]`, `input_lengths [B]`, optionally `pair_ids [B]` that keep rows
                together; B may be 0. Its own plan is used if it has one, unless that packs rows and
                this model must not.
            share_rows: Whether a row may hold several sequences.
            device: Device of the returned tensors.

        Raises:
            DataError: If a sequence of any data rank does not fit; raised on all ranks, since the
                others would wait.
        """
        plan, most = agreed_plan(lambda: self._of_rank(batch, share_rows), self._largest)
        for microbatch in plan:
            part = batch.select_indices(microbatch.indices).to(device)
            yield MicrobatchPart(cropped(part, int(part["input_lengths"].max())), microbatch)
        for _ in range(most - len(plan)):
            yield _filler(device)

    def _of_rank(self, batch: BatchedDataDict, share_rows: bool) -> list[Microbatch]:
        plan = batch.microbatches
        shared = any(len(row) > 1 for part in plan or () for row in part.rows)
        if plan is None or (shared and not share_rows):
            return self._plan(batch, share_rows)
        return plan

    def _largest(self, count: int) -> int:
        return count if self._mesh is None else self._mesh.data_max(count)

    def _plan(self, batch: BatchedDataDict, share_rows: bool) -> list[Microbatch]:
        lengths = tuple(batch["input_lengths"].tolist())
        pairs = tuple(batch["pair_ids"].tolist()) if "pair_ids" in batch else None
        key = lengths, pairs, share_rows
        if key not in self._plans:
            # A step plans three times with the same lengths: old logprobs, reference, training.
            plan = plan_microbatches(
                lengths, max_tokens=self._max_tokens, bundles=pairs, share_rows=share_rows
            )
            self._plans = {key: plan}
        return self._plans[key]


def _filler(device: torch.device) -> MicrobatchPart:
    filler = BatchedDataDict(
        {
            "input_ids": torch.zeros(1, 2, dtype=torch.long),
            "input_lengths": torch.tensor([2]),
            "token_mask": torch.zeros(1, 1, dtype=torch.bool),
        }
    )
    return MicrobatchPart(filler.to(device), Microbatch(rows=((0,),), row_length=2), is_filler=True)
