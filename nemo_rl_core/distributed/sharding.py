"""A batch divided over data-parallel ranks, and what they return put back in order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nemo_rl_core.distributed.packing.flops import sequence_flops
from nemo_rl_core.distributed.packing.microbatches import NO_SEQUENCES, Microbatch
from nemo_rl_core.distributed.packing.ranks import pack_for_ranks, plan_for_ranks
from nemo_rl_core.distributed.packing.settings import DynamicBatching, SequencePacking

if TYPE_CHECKING:
    from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict


@dataclass(frozen=True)
class Shards:
    """The parts of a batch, one a rank; as a sequence, its batches.

    Attributes:
        batches: The rows of each rank; a planned one carries its `microbatches`.
        indices: For each rank, which row of the whole each of its rows was.

    Example:
        >>> import torch
        >>> from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
        >>> batch = BatchedDataDict({"input_lengths": torch.tensor([4, 3, 2, 1])})
        >>> shards = shard_for_training(batch, num_ranks=2, max_tokens=8)
        >>> shards.indices
        ((0, 1, 3), (2,))
        >>> doubled = [BatchedDataDict({"x": 2 * shard["input_lengths"]}) for shard in shards]
        >>> shards.restored(doubled)["x"].tolist()
        [8, 6, 4, 2]
    """

    batches: tuple["BatchedDataDict", ...]
    indices: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator["BatchedDataDict"]:
        return iter(self.batches)

    def __getitem__(self, rank: int) -> "BatchedDataDict":
        return self.batches[rank]

    @property
    def order(self) -> list[int]:
        """`indices` of one rank after the other: what `reorder_data` undoes."""
        return [index for indices in self.indices for index in indices]

    def restored(self, results: Sequence["BatchedDataDict"]) -> "BatchedDataDict":
        """Joins one result a rank, and puts the rows where they stood in the whole batch.

        Args:
            results: In rank order, with one row for each row of the shard. A tensor narrower than
                those of other ranks is padded on the right with 0.
        """
        return type(results[0]).from_batches(results).reorder_data(self.order)


def shard_for_training(
    batch: "BatchedDataDict",
    *,
    num_ranks: int,
    max_tokens: int,
    share_rows: bool = True,
    cost: Callable[[int], int] = sequence_flops,
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
        cost: What a sequence of this length costs.

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
        cost=cost,
    )
    return _planned(batch, plans)


def shard_evenly(
    batch: "BatchedDataDict", num_shards: int, *, batch_size: int | None, allow_uneven_shards: bool
) -> Shards:
    """Consecutive rows of each batch to each shard; see `BatchedDataDict.shard_by_batch_size`."""
    step = max(1, batch.size if batch_size is None else batch_size)
    if not allow_uneven_shards and batch.size and (batch.size % step or step % num_shards):
        raise ValueError(
            f"{batch.size} rows in batches of {step} cannot be divided into {num_shards} equal "
            "shards: expected a multiple of the batch size, and a batch size that is a multiple of "
            "the shards; choose such sizes, or pass allow_uneven_shards=True"
        )
    indices = tuple(
        tuple(
            start + row
            for start in range(0, batch.size, step)
            for row in nth_part(min(step, batch.size - start), shard, num_shards)
        )
        for shard in range(num_shards)
    )
    return Shards(tuple(batch.select_indices(rows) for rows in indices), indices)


def shard_dynamically(
    batch: "BatchedDataDict", num_shards: int, batching: DynamicBatching
) -> Shards:
    """Shards with micro-batches under a token budget, one sequence a row."""
    lengths = _rounded(batch[batching.input_lengths_key], batching.sequence_length_round)
    plans = plan_for_ranks(
        lengths,
        num_ranks=num_shards,
        max_tokens=batching.max_tokens_per_microbatch,
        bundles=_pairs(batch),
        share_rows=False,
    )
    return _planned(batch, plans)


def shard_packed(batch: "BatchedDataDict", num_shards: int, packing: SequencePacking) -> Shards:
    """Shards with micro-batches of one packed row."""
    lengths = _rounded(batch[packing.input_lengths_key], packing.sequence_length_pad_multiple)
    plans = pack_for_ranks(
        lengths,
        num_ranks=num_shards,
        capacity=packing.max_tokens_per_microbatch,
        algorithm=packing.algorithm,
        bundles=_pairs(batch),
    )
    return _planned(batch, plans)


def nth_part(size: int, part: int, num_parts: int) -> range:
    """Which of `size` rows are in a part of nearly equal parts; the first parts are the larger.

    Example:
        >>> [list(nth_part(5, part, 3)) for part in range(3)]
        [[0, 1], [2, 3], [4]]
    """
    rows, left_over = divmod(size, num_parts)
    start = part * rows + min(part, left_over)
    return range(start, start + rows + (part < left_over))


def _planned(batch: "BatchedDataDict", plans: Sequence[Sequence[Microbatch]]) -> Shards:
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


def _pairs(batch: "BatchedDataDict") -> list[int] | None:
    return batch["pair_ids"].tolist() if "pair_ids" in batch else None


def _rounded(lengths: torch.Tensor, multiple: int) -> list[int]:
    rounded: list[int] = (-(-lengths // multiple) * multiple).tolist()
    return rounded
