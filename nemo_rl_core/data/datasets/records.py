"""Records of a source as they come, a chunk at a time; a file is read anew for every pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl_core.data import chunks
from nemo_rl_core.data.chunks import (
    ChunkedRows,
    chunks_of,
    in_lists,
    row_bytes,
    rows_of,
    written,
)
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

Records = Sequence[Mapping[str, Any]]


class ArrowRecords(ChunkedRows):
    """Records that arrow holds.

    Args:
        num_rows: Of all tables together, of which `limit` rows are taken.
        tables: Reads the tables of one pass, each of any size.
        limit: The most rows to take; None takes all.
    """

    def __init__(
        self, num_rows: int, tables: "Callable[[], Iterator[pa.Table]]", limit: int | None = None
    ) -> None:
        self._num_rows = num_rows if limit is None else min(num_rows, limit)
        self._tables = tables

    def __len__(self) -> int:
        return self._num_rows

    def chunks(self) -> "Iterator[pa.Table]":
        """Tables of a chunk's size; reading ends with the last row that is taken."""
        left = self._num_rows
        for table in self._tables():
            if left <= 0:
                return
            taken = table.slice(0, left)
            left -= len(taken)
            yield from _of_a_chunk_size(taken)


class JoinedRecords(ChunkedRows):
    """Records of several files, one after the other."""

    def __init__(self, parts: Sequence[Records]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def chunks(self) -> "Iterator[list[Row] | pa.Table]":
        """The chunks of every part."""
        for part in self._parts:
            yield from chunks_of(part)


class MappedRecords(ChunkedRows):
    """Records whose columns are changed when they are read."""

    def __init__(
        self, records: Records, change: "Callable[[list[Row] | pa.Table], list[Row] | pa.Table]"
    ) -> None:
        self._records, self._change = records, change

    def __len__(self) -> int:
        return len(self._records)

    def chunks(self) -> "Iterator[list[Row] | pa.Table]":
        """The changed chunks."""
        return map(self._change, chunks_of(self._records))


def _of_a_chunk_size(table: "pa.Table") -> "Iterator[pa.Table]":
    size = rows_a_chunk(table.nbytes, len(table))
    for start in range(0, len(table), size):
        yield table.slice(start, size)


def rows_a_chunk(num_bytes: int, num_rows: int) -> int:
    """How many rows of their mean size a chunk holds."""
    return max(1, min(chunks.MAX_ROWS, chunks.MAX_BYTES * max(num_rows, 1) // max(num_bytes, 1)))


def joined(parts: Sequence[Records]) -> Records:
    """The records of several parts; a list where they are lists and few."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, list) for part in parts) and sum(map(len, parts)) <= chunks.MAX_ROWS:
        return [record for part in parts for record in part]
    return JoinedRecords(parts)


def of_dataset(dataset: Any, limit: int | None = None) -> Records:
    """The rows of a `datasets.Dataset` or `IterableDataset`, as plain values."""
    if not hasattr(dataset, "__len__"):  # streamed: it can be gone through but once
        return written(in_lists((dict(row) for row in _first(dataset, limit)), row_bytes))
    num_rows = len(dataset) if limit is None else min(len(dataset), limit)
    if num_rows <= chunks.MAX_ROWS or getattr(dataset, "format", {}).get("type", "") is not None:
        return written(in_lists((dict(row) for row in _first(dataset, limit)), row_bytes))
    size = rows_a_chunk(dataset.data.nbytes, dataset.data.num_rows)
    if all(_is_plain(feature) for feature in dataset.features.values()):
        as_tables = dataset.with_format("arrow")
        return ArrowRecords(
            num_rows,
            lambda: (as_tables[start : start + size] for start in range(0, num_rows, size)),
        )
    ends = ((start, min(start + size, num_rows)) for start in range(0, num_rows, size))
    return written(_rows_of_columns(dataset[start:end]) for start, end in ends)


def _first(records: Any, limit: int | None) -> Iterator[Any]:
    for number, record in enumerate(records):
        if number == limit:
            return
        yield record


def _is_plain(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string", "int64", "int32", "bool")


def _rows_of_columns(columns: Mapping[str, Any]) -> list[Row]:
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def each_record(records: Records) -> Iterator[Mapping[str, Any]]:
    """Every record of one pass."""
    for chunk in chunks_of(records):
        yield from rows_of(chunk)
