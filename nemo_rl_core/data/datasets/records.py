"""Unconverted records of a source, in chunks; a file is read again for every pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from nemo_rl_core.data import chunks
from nemo_rl_core.data.chunks import (
    Chunk,
    ChunkedRows,
    batched_rows,
    chunks_of,
    collect_rows,
    row_bytes,
    rows_per_chunk,
)
from nemo_rl_core.data.json_values import plain_row
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

Records = Sequence[Mapping[str, Any]]


class LazyRecords(ChunkedRows):
    """Records that are read or converted again for every pass."""

    def __init__(self, num_rows: int, read: Callable[[], Iterator[Chunk]]) -> None:
        self._num_rows, self._read = num_rows, read

    def __len__(self) -> int:
        return self._num_rows

    def chunks(self) -> Iterator[Chunk]:
        """Yields the records in order."""
        return self._read()


def arrow_records(
    num_rows: int, tables: "Callable[[], Iterator[pa.Table]]", limit: int | None = None
) -> LazyRecords:
    """Returns the records in arrow tables; reading stops at the limit.

    Args:
        num_rows: Number of rows of all tables.
        tables: Function that reads the tables, of any size, for one pass.
        limit: Maximum number of rows; None for all.
    """
    count = num_rows if limit is None else min(num_rows, limit)

    def read() -> Iterator[Chunk]:
        remaining = count
        for table in tables():
            if remaining <= 0:
                return
            part = table.slice(0, remaining)
            remaining -= len(part)
            size = rows_per_chunk(part.nbytes, len(part))
            for start in range(0, len(part), size):
                yield part.slice(start, size)

    return LazyRecords(count, read)


def mapped(records: Records, change: Callable[[Chunk], Chunk]) -> LazyRecords:
    """Returns records whose chunks are changed during iteration."""
    return LazyRecords(len(records), lambda: map(change, chunks_of(records)))


def joined(parts: Sequence[Records]) -> Records:
    """Concatenates records; returns a list if all parts are lists and the rows are few."""
    if len(parts) == 1:
        return parts[0]
    num_rows = sum(map(len, parts))
    if all(isinstance(part, list) for part in parts) and num_rows <= chunks.MAX_ROWS:
        return [record for part in parts for record in part]
    return LazyRecords(num_rows, lambda: (chunk for part in parts for chunk in chunks_of(part)))


def dataset_records(dataset: Any, limit: int | None = None) -> Records:
    """Returns the rows of a `datasets.Dataset` or `IterableDataset`, as plain values."""
    # A stream has no length and can be iterated only once.
    num_rows = len(dataset) if hasattr(dataset, "__len__") else 0
    num_rows = num_rows if limit is None else min(num_rows, limit)
    if num_rows <= chunks.MAX_ROWS or getattr(dataset, "format", {}).get("type", "") is not None:
        rows = (plain_row(record, is_padded=True) for record in islice(dataset, limit))
        return collect_rows(batched_rows(rows, row_bytes))
    size = rows_per_chunk(dataset.data.nbytes, dataset.data.num_rows)
    if all(_is_plain(feature) for feature in dataset.features.values()):
        as_tables = dataset.with_format("arrow")
        return arrow_records(
            num_rows,
            lambda: (as_tables[start : start + size] for start in range(0, num_rows, size)),
        )
    ends = ((start, min(start + size, num_rows)) for start in range(0, num_rows, size))
    return collect_rows(_rows_of_columns(dataset[start:end]) for start, end in ends)


def _is_plain(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string", "int64", "int32", "bool")


def _rows_of_columns(columns: Mapping[str, Any]) -> list[Row]:
    names = list(columns)
    rows = (dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return [plain_row(row, is_padded=True) for row in rows]
