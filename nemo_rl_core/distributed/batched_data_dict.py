"""A dictionary of columns with one row a sequence."""

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from nemo_rl_core.distributed.packing.microbatches import Microbatch
from nemo_rl_core.distributed.packing.settings import (
    DynamicBatching,
    SequencePacking,
    as_record,
)
from nemo_rl_core.distributed.sharding import (
    Shards,
    nth_part,
    shard_dynamically,
    shard_evenly,
    shard_packed,
)

MULTIMODAL_COLUMNS = frozenset(
    {
        "pixel_values",
        "image_grid_thw",
        "image_sizes",
        "pixel_attention_mask",
        "mm_token_type_ids",
    }
)
"""Columns that are arguments of vision-language models in transformers."""


class BatchedDataDict(UserDict[str, Any]):
    """Columns of equal length: tensors whose first dimension is the batch, or plain lists.

    Example:
        >>> batch = BatchedDataDict({"input_ids": torch.tensor([[1, 2], [3, 4]]), "id": ["a", "b"]})
        >>> batch.select_indices([1])["id"]
        ['b']
    """

    microbatches: list[Microbatch] | None = None
    """How the rows are to be computed, where that is planned already; its indices count within this
    batch. It goes along with copies, moves and pickles, and is dropped where rows change."""

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_values: Mapping[str, float] | None = None
    ) -> Self:
        """Joins batches; tensors are padded on the right to the widest, in every dimension.

        Args:
            batches: Batches with the same columns; of none, the result has no columns.
            pad_values: What fills each column's padding; 0 where a column is not named.

        Raises:
            ValueError: If the columns differ, or the number of dimensions of one.
        """
        columns = {frozenset(batch) for batch in batches}
        if len(columns) > 1:
            raise ValueError(
                f"batches need the same columns, got {sorted(sorted(keys) for keys in columns)}"
            )
        joined: dict[str, Any] = {}
        for key, first in batches[0].items() if batches else ():
            values = [batch[key] for batch in batches]
            if isinstance(first, torch.Tensor):
                joined[key] = _cat_padded(values, (pad_values or {}).get(key, 0))
            else:
                joined[key] = [item for value in values for item in value]
        return cls(joined)

    @property
    def size(self) -> int:
        """How many rows there are; 0 without columns.

        Raises:
            ValueError: If the columns disagree.
        """
        lengths = {key: len(value) for key, value in self.data.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of one batch must have equal lengths, got {lengths}")
        return next(iter(lengths.values()), 0)

    def get_multimodal_dict(self) -> dict[str, Any]:
        """What a model reads besides tokens, by the name of its argument; empty for text.

        Images differ in size, so such a column is a list of one tensor a row, or None for a row
        without images, and the tensors are joined over the rows; `mm_token_type_ids [B, T]`, which
        marks image tokens, is a tensor already.
        """
        found: dict[str, Any] = {}
        for key in MULTIMODAL_COLUMNS & self.data.keys():
            value = self.data[key]
            if isinstance(value, torch.Tensor):
                found[key] = value
            elif tensors := [item for item in value if item is not None]:
                found[key] = torch.cat(tensors)
        return found

    def reorder_data(self, indices: Sequence[int]) -> Self:
        """Puts row `i` at place `indices[i]`; undoes `select_indices(indices)` of a permutation.

        Raises:
            ValueError: If the indices are no permutation of the rows.
        """
        if sorted(indices) != list(range(self.size)):
            raise ValueError(f"expected a permutation of {self.size} rows, got {list(indices)}")
        return self.select_indices(sorted(range(len(indices)), key=lambda row: indices[row]))

    def select_indices(self, indices: Sequence[int]) -> Self:
        """The rows at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.long)
        return type(self)(
            {
                key: value[index]
                if isinstance(value, torch.Tensor)
                else [value[i] for i in index.tolist()]
                for key, value in self.data.items()
            }
        )

    def slice(self, start: int, end: int) -> Self:
        """The rows from `start` up to, not including, `end`."""
        return type(self)({key: value[start:end] for key, value in self.data.items()})

    def chunk(self, rank: int, chunks: int) -> Self:
        """Part `rank` of `chunks` consecutive parts whose sizes differ by one at most.

        Raises:
            ValueError: If there is no such part; one without rows there is.
        """
        if not 0 <= rank < chunks:
            raise ValueError(f"expected a rank from 0 to {chunks - 1}, got {rank}")
        rows = nth_part(self.size, rank, chunks)
        return self.slice(rows.start, rows.stop)

    def get_batch(self, batch_idx: int, batch_size: int) -> Self:
        """Batch `batch_idx` of consecutive batches of `batch_size` rows; the last may be shorter.

        Raises:
            ValueError: If there is no such batch.
        """
        _refuse_non_positive("batch_size", batch_size)
        start = batch_idx * batch_size
        if not 0 <= start < max(1, self.size):
            raise ValueError(
                f"there is no batch {batch_idx} of {batch_size} rows: expected one from 0 to "
                f"{max(0, self.size - 1) // batch_size}"
            )
        return self.slice(start, start + batch_size)

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Each row `num_repeats` times, one after the other; items of lists are not copied."""
        return self.select_indices([row for row in range(self.size) for _ in range(num_repeats)])

    def truncate_tensors(self, dim: int, length: int) -> Self:
        """The same rows, with at most `length` entries in dimension `dim` of every tensor.

        Images, whose dimensions are not those of tokens, and tensors without this dimension stay
        as they are.

        Raises:
            ValueError: If the dimension is that of the rows, or counted from the end.
        """
        if dim < 1:
            raise ValueError(f"expected a dimension from 1, which leaves the rows alone, got {dim}")
        truncated = self.copy()
        for key, value in self.data.items():
            if (
                isinstance(value, torch.Tensor)
                and value.dim() > dim
                and key not in MULTIMODAL_COLUMNS - {"mm_token_type_ids"}
            ):
                truncated[key] = value.narrow(dim, 0, min(length, value.shape[dim]))
        return truncated

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        *,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatching | Mapping[str, Any] | None = None,
        sequence_packing_args: SequencePacking | Mapping[str, Any] | None = None,
    ) -> Shards:
        """Divides the rows over data-parallel ranks.

        Args:
            shards: How many.
            batch_size: Rows are taken in consecutive batches of this many, and each shard gets its
                part of every batch, batch after batch. None takes all rows as one.
            allow_uneven_shards: Whether shards, and the last batch, may differ in size; shards may
                then be empty. Batching and packing are always free to.
            dynamic_batching_args: Shares rows out by cost, with a plan of micro-batches of rows of
                like length; a mapping has the fields of `DynamicBatching`.
            sequence_packing_args: Shares rows out by cost, with a plan of micro-batches that are
                one packed row each; a mapping has the fields of `SequencePacking`.

        Returns:
            The shards, as a sequence of batches, with the rows that each had before.
            `Shards.restored` puts results back. With batching or packing, each carries as many
            `microbatches` as the others, or fewer where its rows are too few for that, and rows of
            equal `pair_ids` are in one of them.

        Raises:
            ValueError: If the rows do not divide evenly, or arguments contradict each other.
            DataError: If a row is longer than a micro-batch.

        Example:
            >>> batch = BatchedDataDict({"x": [1, 2, 3, 4]})
            >>> [shard["x"] for shard in batch.shard_by_batch_size(2)]
            [[1, 2], [3, 4]]
            >>> [shard["x"] for shard in batch.shard_by_batch_size(2, batch_size=2)]
            [[1, 3], [2, 4]]
        """
        _refuse_non_positive("shards", shards)
        planned = dynamic_batching_args is not None or sequence_packing_args is not None
        if planned and batch_size is not None:
            raise ValueError(
                "batch_size cannot be given with dynamic batching or sequence packing; "
                "shard each get_batch(batch_idx, batch_size) instead"
            )
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ValueError("expected dynamic batching or sequence packing, got both")
        if dynamic_batching_args is not None:
            return shard_dynamically(
                self, shards, as_record(DynamicBatching, dynamic_batching_args)
            )
        if sequence_packing_args is not None:
            return shard_packed(self, shards, as_record(SequencePacking, sequence_packing_args))
        if batch_size is not None:
            _refuse_non_positive("batch_size", batch_size)
        return shard_evenly(
            self, shards, batch_size=batch_size, allow_uneven_shards=allow_uneven_shards
        )

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        """Consecutive micro-batches of `microbatch_size` rows; the last may be shorter."""
        _refuse_non_positive("microbatch_size", microbatch_size)
        for start in range(0, self.size, microbatch_size):
            yield self.slice(start, start + microbatch_size)

    def make_planned_microbatch_iterator(self) -> Iterator[tuple[Self, Microbatch]]:
        """Rows of each of `microbatches`, in its order, and how they share rows of tokens.

        Raises:
            ValueError: If nothing is planned.
        """
        if self.microbatches is None:
            raise ValueError(
                "the batch has no planned micro-batches: shard it with dynamic batching or "
                "sequence packing, or take make_microbatch_iterator"
            )
        for microbatch in self.microbatches:
            yield self.select_indices(microbatch.indices), microbatch

    def to(self, device: torch.device | str) -> Self:
        """The same batch with its tensors on `device`."""
        moved = self.copy()
        moved.update({key: _moved(value, device) for key, value in self.data.items()})
        return moved


def _refuse_non_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [item.to(device) if isinstance(item, torch.Tensor) else item for item in value]


def _cat_padded(tensors: Sequence[torch.Tensor], pad_value: float) -> torch.Tensor:
    shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(f"rows of one column need the same number of dimensions, got {shapes}")
    widest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return torch.cat([_padded(tensor, widest, pad_value) for tensor in tensors])


def _padded(tensor: torch.Tensor, sizes: Sequence[int], pad_value: float) -> torch.Tensor:
    missing = [size - have for size, have in zip(sizes, tensor.shape[1:], strict=True)]
    # `pad` counts from the last dimension, and wants what comes before and behind each.
    pads = [amount for behind in reversed(missing) for amount in (0, behind)]
    return torch.nn.functional.pad(tensor, pads, value=pad_value) if any(missing) else tensor
