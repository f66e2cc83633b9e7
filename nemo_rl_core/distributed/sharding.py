"""A batch divided over data-parallel ranks, and what they return put back in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import NO_SEQUENCES, Microbatch
from nemo_rl_core.distributed.packing.ranks import plan_for_ranks


@dataclass(frozen=True)
class Shards:
    """The parts of a batch, one a rank; as a sequence, its batches.

    Attributes:
        batches: The rows of each rank; a planned one carries its `microbatches`.
        indices: For each rank, which row of the whole each of its rows was.

    Example:
        >>> import torch
        >>> batch = BatchedDataDict({"input_lengths": torch.tensor([4, 3, 2, 1])})
        >>> shards = shard_for_training(batch, num_ranks=2, max_tokens=8)
        >>> shards.indices
        ((0, 1, 3), (2,))
        >>> doubled = [BatchedDataDict({"x": 2 * shard["input_lengths"]}) for shard in shards]
        >>> shards.restored(doubled)["x"].tolist()
        [8, 6, 4, 2]
    """

    batches: tuple[BatchedDataDict, ...]
    indices: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[BatchedDataDict]:
        return iter(self.batches)

    def __getitem__(self, rank: int) -> BatchedDataDict:
        return self.batches[rank]

    @property
    def order(self) -> list[int]:
        """`indices` of one rank after the other: what `reorder_data` undoes."""
        return [index for indices in self.indices for index in indices]

    def restored(self, results: Sequence[BatchedDataDict]) -> BatchedDataDict:
        """Joins one result a rank, and puts the rows where they stood in the whole batch.

        Args:
            results: In rank order, with one row for each row of the shard. A tensor narrower than
                those of other ranks is padded on the right with 0.
        """
        return type(results[0]).from_batches(results).reorder_data(self.order)


def shard_for_training(
    batch: BatchedDataDict,
    *,
    num_ranks: int,
    max_tokens: int,
    share_rows: bool = True,
) -> Shards:
    """Gives each data-parallel rank rows and a plan of micro-batches; see `plan_for_ranks`.

    All ranks have the same number of micro-batches and nearly the same work; a rank whose rows are
    too few for that has fewer, and its backend fills up. Rows of equal `pair_ids` stay in one
    micro-batch. With one rank, the shard is the batch as it was.

    Args:
        batch: With `input_lengths [B]`, and `pair_ids [B]` where rows belong together.
        num_ranks: Data-parallel ranks. Those past the rows get a shard without rows.
        max_tokens: The budget of one micro-batch: rows times row length.
        share_rows: Whether a row may hold several sequences.

    Returns:
        One shard a rank. Its rows are in the order of the batch, and the indices in its
        `microbatches` count within the shard.

    Raises:
        DataError: If one row, or one pair, alone is more than the budget.
    """
    plans = plan_for_ranks(
        batch["input_lengths"].tolist(),
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        bundles=_pairs(batch),
        share_rows=share_rows,
    )
    return _planned(batch, plans)


def _planned(batch: BatchedDataDict, plans: Sequence[Sequence[Microbatch]]) -> Shards:
    indices = tuple(tuple(sorted(i for part in plan for i in part.indices)) for plan in plans)
    batches = []
    for rows, plan in zip(indices, plans, strict=True):
        shard = batch.select_indices(rows)
        place = {row: number for number, row in enumerate(rows)}
        # What stands in for no sequences is the backend's to choose: it knows which shape of
        # filler its model takes, and counts the micro-batches of all ranks in any case.
        shard.microbatches = [part.renumbered(place) for part in plan if part != NO_SEQUENCES]
        batches.append(shard)
    return Shards(tuple(batches), indices)


def _pairs(batch: BatchedDataDict) -> list[int] | None:
    return batch["pair_ids"].tolist() if "pair_ids" in batch else None
