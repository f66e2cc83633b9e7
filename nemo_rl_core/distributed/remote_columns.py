"""Columns whose values stay in the object store; the controller has references to them.

A block is the output of one worker: columns of its rows, as arrays. It stays in Ray's object store,
on the worker's machine, until no row refers to it. Code that computes on rows reads them with
`fetched`. Selecting rows, or joining those of several workers, reads nothing.
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
    """A reference to a block in this process."""

    block: Block


class RemoteRow(NamedTuple):
    """A row of a block: the reference to the block, and the index of the row in it."""

    reference: Any
    number: int


def as_block(columns: Mapping[str, Any]) -> Block:
    """Returns columns as arrays, which processes of one machine share without copying."""
    return {
        name: value.detach().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in columns.items()
    }


def from_block(block: Block) -> dict[str, Any]:
    """Returns columns as tensors; arrays are copied, since those of the store are read-only."""
    return {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in block.items()
    }


def read_blocks(references: Sequence[Any]) -> list[Block]:
    """Returns the blocks of references, in order."""
    others = [each for each in references if not isinstance(each, InProcess)]
    fetched = iter(())
    if others:
        import ray

        fetched = iter(ray.get(others))
    return [each.block if isinstance(each, InProcess) else next(fetched) for each in references]


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """`B` rows of remote blocks; in a batch, one column that replaces all columns of the blocks.

    Attributes:
        block: `[B]` int, the index of each row's block.
        row: `[B]` int, the index of each row in its block.
        column: Name of a single column of the blocks; None for all columns.

    Example:
        >>> first = InProcess({"x": np.array([[1, 2], [3, 4]])})
        >>> second = InProcess({"x": np.array([[5]])})
        >>> rows = RemoteRows.of_blocks([first, second], [2, 1])[[2, 0]]
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
        """Returns all rows of the blocks, in order."""
        counts = np.asarray(sizes, np.int64)
        block = np.repeat(np.arange(len(counts)), counts)
        starts = np.cumsum(counts) - counts
        return cls(tuple(references), block, np.arange(len(block)) - starts[block])

    @classmethod
    def of_each(cls, rows: Sequence[RemoteRow]) -> Self:
        """Returns single rows, in order."""
        blocks = {id(each.reference): each.reference for each in rows}
        indices = dict(zip(blocks, range(len(blocks)), strict=True))
        block = np.array([indices[id(each.reference)] for each in rows], np.int64)
        return cls(
            tuple(blocks.values()), block, np.array([each.number for each in rows], np.int64)
        )

    def each(self) -> list[RemoteRow]:
        """Returns the rows one by one, in the form of `of_each`."""
        rows = zip(self.block.tolist(), self.row.tolist(), strict=True)
        return [RemoteRow(self.references[block], number) for block, number in rows]

    @classmethod
    def concatenated(cls, parts: "Sequence[RemoteRows]") -> "RemoteRows":
        """Concatenates rows of the same columns."""
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

    def __getitem__(self, rows: "slice | np.ndarray[Any, np.dtype[np.int64]]") -> "RemoteRows":
        """Returns the rows of a slice, or at indices; nothing is read."""
        return RemoteRows(self.references, self.block[rows], self.row[rows], self.column)

    def reordered(self, order: "np.ndarray[Any, np.dtype[np.int64]]") -> "RemoteRows":
        """Moves row `i` to index `order[i]`, like `BatchedDataDict.reorder_data`."""
        rows = np.empty(len(order), np.int64)
        rows[order] = np.arange(len(order))
        return replace(self, block=self.block[rows], row=self.row[rows])

    def of_column(self, column: str) -> "RemoteRows":
        """Returns the same rows with only one column."""
        return replace(self, column=column)

    def compact(self) -> "RemoteRows":
        """Drops references to blocks without any of the rows.

        Without rows, one reference is kept, since it determines the columns.
        """
        if not len(self):
            return replace(self, references=self.references[:1])
        is_used = np.zeros(len(self.references), np.bool_)
        is_used[self.block] = True
        references = tuple(self.references[i] for i in np.flatnonzero(is_used).tolist())
        block = (np.cumsum(is_used) - 1)[self.block]
        return RemoteRows(references, block, self.row, self.column)

    def __reduce__(self) -> Any:
        rows = self.compact()  # a reader must not keep blocks that it does not read
        return RemoteRows, (rows.references, rows.block, rows.row, rows.column)

    def fetched(self) -> dict[str, Any]:
        """Reads the rows: tensors padded on the right with 0, and lists, by column.

        A column that some blocks lack is left out: failed rollouts may have one that no other has.
        """
        rows = self.compact()
        blocks = read_blocks(rows.references)
        shared = [name for name in blocks[0] if all(name in each for each in blocks)]
        names = shared if self.column is None else [self.column]
        return {name: _joined([each[name] for each in blocks], rows) for name in names}


@dataclass(frozen=True, eq=False)
class BlockParts(Sequence[Block]):
    """Consecutive parts of a block, one per worker, which neighboring workers share.

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
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"part {index} of {len(self)}")
        start = int(self.ends[index - 1]) if index else 0
        end = int(self.ends[index])
        return {name: column[start:end] for name, column in self.block.items()}


def _joined(values: Sequence[Any], rows: RemoteRows) -> Any:
    if not isinstance(values[0], np.ndarray):
        pairs = zip(rows.block.tolist(), rows.row.tolist(), strict=True)
        return [values[block][row] for block, row in pairs]
    if len(values) == 1:
        return torch.from_numpy(values[0][rows.row])  # a copy: blocks are read-only
    sizes = [max(size) for size in zip(*(each.shape[1:] for each in values), strict=True)]
    gathered = np.zeros((len(rows), *sizes), values[0].dtype)
    for number, value in enumerate(values):
        rows_of_block = np.flatnonzero(rows.block == number)
        inner: tuple[Any, ...] = tuple(slice(size) for size in value.shape[1:])
        gathered[(rows_of_block, *inner)] = value[rows.row[rows_of_block]]
    return torch.from_numpy(gathered)
