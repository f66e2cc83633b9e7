"""Rows of a batch whose values lie where they were made: the controller holds references.

A block is what one worker has made: columns of its rows, as arrays. It lies in Ray's object store,
on the worker's machine, until no row of it is referred to. Whoever computes on rows reads them
(`fetched`); to select rows, or to join those of several workers, nothing is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, overload

import numpy as np
import torch

Block = Mapping[str, Any]
"""Columns of equal length: arrays whose first dimension is the rows, or lists."""


@dataclass(frozen=True)
class InProcess:
    """A reference to a block in this process, where no worker has made it."""

    block: Block


class HeldRow(NamedTuple):
    """A row of a block: the reference of the block, and the row's number there."""

    reference: Any
    number: int


def as_block(columns: Mapping[str, Any]) -> Block:
    """Columns as arrays, which processes of one machine read without a copy of all of them."""
    return {
        name: value.detach().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in columns.items()
    }


def from_block(block: Block) -> dict[str, Any]:
    """The columns with tensors of their own in place of arrays, which a reader must not change."""
    return {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in block.items()
    }


def read_blocks(references: Sequence[Any]) -> list[Block]:
    """The blocks that references stand for, in their order."""
    others = [each for each in references if not isinstance(each, InProcess)]
    found = iter(())
    if others:
        import ray

        found = iter(ray.get(others))
    return [each.block if isinstance(each, InProcess) else next(found) for each in references]


@dataclass(frozen=True, eq=False)
class HeldRows:
    """`B` rows of blocks elsewhere; in a batch, a column in place of all that the blocks have.

    Attributes:
        references: Of the blocks.
        block: `[B]` int: in which of them each row lies.
        row: `[B]` int: which of that block's rows it is.
        column: The one column of the blocks that is meant; None for all of them.

    Example:
        >>> first = InProcess({"x": np.array([[1, 2], [3, 4]])})
        >>> second = InProcess({"x": np.array([[5]])})
        >>> rows = HeldRows.of_blocks([first, second], [2, 1])[[2, 0]]
        >>> rows.fetched()["x"]
        tensor([[5, 0],
                [1, 2]])
    """

    references: tuple[Any, ...]
    block: np.ndarray[Any, np.dtype[np.int64]]
    row: np.ndarray[Any, np.dtype[np.int64]]
    column: str | None = None

    @classmethod
    def of_blocks(
        cls, references: Sequence[Any], sizes: "Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]"
    ) -> Self:
        """All rows of some blocks, one block after the other.

        Args:
            references: Of the blocks.
            sizes: How many rows each has.
        """
        counts = np.asarray(sizes, np.int64)
        block = np.repeat(np.arange(len(counts)), counts)
        starts = np.cumsum(counts) - counts
        return cls(tuple(references), block, np.arange(len(block)) - starts[block])

    @classmethod
    def of_each(cls, rows: Sequence[HeldRow]) -> Self:
        """Single rows, in their order."""
        blocks = {id(each.reference): each.reference for each in rows}
        places = dict(zip(blocks, range(len(blocks)), strict=True))
        block = np.array([places[id(each.reference)] for each in rows], np.int64)
        return cls(
            tuple(blocks.values()), block, np.array([each.number for each in rows], np.int64)
        )

    def each(self) -> list[HeldRow]:
        """The rows one by one, as `of_each` takes them."""
        rows = zip(self.block.tolist(), self.row.tolist(), strict=True)
        return [HeldRow(self.references[block], number) for block, number in rows]

    @classmethod
    def concatenated(cls, parts: "Sequence[HeldRows]") -> "HeldRows":
        """The rows of one after the other, of the same columns."""
        counts = [len(part.references) for part in parts]
        starts = np.cumsum(counts) - counts
        return cls(
            tuple(reference for part in parts for reference in part.references),
            np.concatenate([part.block + start for part, start in zip(parts, starts, strict=True)]),
            np.concatenate([part.row for part in parts]),
            parts[0].column,
        )

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, rows: "slice | np.ndarray[Any, np.dtype[np.int64]]") -> "HeldRows":
        """The rows of a slice, or at indices, in their order; nothing is read."""
        return HeldRows(self.references, self.block[rows], self.row[rows], self.column)

    def reordered(self, order: "np.ndarray[Any, np.dtype[np.int64]]") -> "HeldRows":
        """Row `i` at place `order[i]`, as `BatchedDataDict.reorder_data` has it."""
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return replace(self, block=self.block[places], row=self.row[places])

    def of_column(self, column: str) -> "HeldRows":
        """The same rows of one column."""
        return replace(self, column=column)

    def compact(self) -> "HeldRows":
        """The same rows, without references to blocks that have none of them.

        One is kept where there are no rows: it says which columns there would be.
        """
        if not len(self):
            return replace(self, references=self.references[:1])
        is_used = np.zeros(len(self.references), np.bool_)
        is_used[self.block] = True
        references = tuple(self.references[i] for i in np.flatnonzero(is_used).tolist())
        block = (np.cumsum(is_used) - 1)[self.block]
        return HeldRows(references, block, self.row, self.column)

    def __reduce__(self) -> Any:
        rows = self.compact()  # no reader is to keep blocks that it does not read
        return HeldRows, (rows.references, rows.block, rows.row, rows.column)

    def fetched(self) -> dict[str, Any]:
        """The values of the rows, by column: tensors padded on the right with 0, and lists."""
        rows = self.compact()
        blocks = read_blocks(rows.references)
        names = list(blocks[0]) if self.column is None else [self.column]
        return {name: _joined([each[name] for each in blocks], rows) for name in names}


@dataclass(frozen=True, eq=False)
class BlockParts(Sequence[Block]):
    """Consecutive parts of a block, one a worker: what neighbours read is sent as one.

    Attributes:
        block: The rows of all parts, one part after the other.
        ends: `[n]` int: behind which row each part ends.

    Example:
        >>> parts = BlockParts({"x": np.array([4, 5, 6])}, np.array([1, 3]))
        >>> [part["x"].tolist() for part in parts]
        [[4], [5, 6]]
    """

    block: Block
    ends: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, place: int) -> Block: ...
    @overload
    def __getitem__(self, place: slice) -> list[Block]: ...
    def __getitem__(self, place: int | slice) -> Block | list[Block]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(f"part {place} of {len(self)}")
        start = int(self.ends[place - 1]) if place else 0
        end = int(self.ends[place])
        return {name: column[start:end] for name, column in self.block.items()}


def _joined(values: Sequence[Any], rows: HeldRows) -> Any:
    """One column of the rows, from those of the blocks."""
    if not isinstance(values[0], np.ndarray):
        pairs = zip(rows.block.tolist(), rows.row.tolist(), strict=True)
        return [values[block][row] for block, row in pairs]
    if len(values) == 1:
        return torch.from_numpy(values[0][rows.row])  # a copy: blocks are read-only
    sizes = [max(size) for size in zip(*(each.shape[1:] for each in values), strict=True)]
    found = np.zeros((len(rows), *sizes), values[0].dtype)
    for number, value in enumerate(values):
        places = np.flatnonzero(rows.block == number)
        inner: tuple[Any, ...] = tuple(slice(size) for size in value.shape[1:])
        found[(places, *inner)] = value[rows.row[places]]
    return torch.from_numpy(found)
