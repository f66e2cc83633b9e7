"""Rows in chunks: few rows stay in memory, many are stored on disk.

A chunk is a list of rows, or an arrow table if all its values are text. `RowWriter` takes chunks
and returns a list of up to `MAX_ROWS` rows, or `StoredRows` in a temporary folder that is deleted
with them.
"""

import pickle
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

from nemo_rl_core.data.json_values import without_padding
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

MAX_ROWS = 65_536
"""Maximum rows of a chunk; a data set with at most this many rows is a list."""

MAX_BYTES = 64 * 2**20
"""Approximate maximum size of a chunk in bytes."""

Chunk: TypeAlias = "list[Row] | pa.Table"
"""Rows as mappings, or as a table of text columns."""


class ChunkedRows(Sequence[Row]):
    """Rows that can be iterated in chunks, repeatedly."""

    def chunks(self) -> Iterator[Chunk]:
        """Yields the rows in order."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Row]:
        for chunk in self.chunks():
            yield from rows_of(chunk)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._at(position) for position in range(*index.indices(len(self)))]
        return self._at(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _at(self, index: int) -> Row:
        for chunk in self.chunks():
            if index < len(chunk):
                return rows_of(chunk[index : index + 1])[0]
            index -= len(chunk)
        raise IndexError(index)


@dataclass(frozen=True)
class _Piece:
    path: Path
    num_rows: int

    def read(self) -> Chunk:
        if self.path.suffix == ".pickle":
            # This process wrote the file, in a folder that only its user can open.
            rows: list[Row] = pickle.loads(self.path.read_bytes())  # noqa: S301
            return rows
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            return pa.ipc.open_file(file).read_all()


class StoredRows(ChunkedRows):
    """Rows in temporary files, which are deleted with the last reference to them."""

    def __init__(
        self, pieces: Sequence[_Piece], folder: "tempfile.TemporaryDirectory[str]"
    ) -> None:
        self._pieces, self._folder = pieces, folder
        self._ends = list(accumulate(piece.num_rows for piece in pieces))
        # Most reads are sequential.
        self._read = lru_cache(maxsize=1)(_Piece.read)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def chunks(self) -> Iterator[Chunk]:
        """Yields one chunk per file."""
        for piece in self._pieces:
            yield piece.read()

    def _at(self, index: int) -> Row:
        number = bisect_right(self._ends, index)
        start = self._ends[number] - self._pieces[number].num_rows
        chunk = self._read(self._pieces[number])
        return rows_of(chunk[index - start : index - start + 1])[0]


class RowWriter:
    """Collects chunks, on disk beyond `MAX_ROWS` rows or twice `MAX_BYTES`.

    Args:
        in_memory: Whether few rows stay in memory as a list.
    """

    def __init__(self, *, in_memory: bool = True) -> None:
        self._in_memory = in_memory
        self._buffer: list[Any] = []
        self._num_bytes = 0
        self._num_buffered = 0
        self._pieces: list[_Piece] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, chunk: Chunk) -> None:
        """Appends rows."""
        if not len(chunk):
            return
        self._buffer.append(chunk)
        self._num_buffered += len(chunk)
        self._num_bytes += num_bytes(chunk)
        if self._num_buffered > MAX_ROWS or self._num_bytes > 2 * MAX_BYTES:
            self._flush()

    def close(self) -> Sequence[Row]:
        """Returns all rows in order."""
        if self._folder is None and self._in_memory:
            return [row for chunk in self._buffer for row in rows_of(chunk)]
        self._flush()
        assert self._folder is not None
        return StoredRows(self._pieces, self._folder)

    def _flush(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="nemo_rl_rows_")
        for chunk in _joined(self._buffer):
            name = f"{len(self._pieces):06d}"
            path = Path(self._folder.name, name)
            if isinstance(chunk, list):
                path = path.with_suffix(".pickle")
                path.write_bytes(pickle.dumps(chunk, protocol=pickle.HIGHEST_PROTOCOL))
            else:
                path = path.with_suffix(".arrow")
                write_arrow([chunk], path)
            self._pieces.append(_Piece(path, len(chunk)))
        self._buffer, self._num_buffered, self._num_bytes = [], 0, 0


def _joined(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """Merges adjacent lists into one chunk, since small files make small chunks."""
    merged: list[Row] = []
    for chunk in chunks:
        if isinstance(chunk, list):
            merged += chunk
            continue
        if merged:
            yield merged
            merged = []
        yield chunk
    if merged:
        yield merged


def write_arrow(tables: "Iterable[pa.Table]", path: Path) -> None:
    """Writes one or more tables of the same schema as one arrow file."""
    import pyarrow as pa

    remaining = iter(tables)
    first = next(remaining)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
        writer.write_table(first)
        for table in remaining:
            writer.write_table(table)


def chunks_of(rows: Sequence[Any]) -> Iterator[Chunk]:
    """Yields the chunks of `ChunkedRows`, or slices of a list."""
    if isinstance(rows, ChunkedRows):
        yield from rows.chunks()
        return
    for start in range(0, len(rows), MAX_ROWS):
        yield list(rows[start : start + MAX_ROWS])


def rows_of(chunk: Chunk) -> list[Row]:
    """Returns the rows of a chunk as mappings from columns to values.

    Arrow pads all structs of a column to the same keys; keys with null values are left out, at any
    depth.
    """
    if isinstance(chunk, list):
        return chunk
    rows: list[Row] = chunk.to_pylist()
    padded = [field.name for field in chunk.schema if "struct<" in str(field.type)]
    for row in rows if padded else ():
        row.update({name: without_padding(row[name]) for name in padded})
    return rows


def num_bytes(chunk: Chunk) -> int:
    """Returns the approximate size of a chunk in bytes; for a list, from a sample of its rows."""
    if not isinstance(chunk, list):
        return int(chunk.nbytes)
    step = max(1, len(chunk) // 32)
    return step * sum(row_bytes(row) for row in chunk[::step])


def row_bytes(row: Mapping[str, Any]) -> int:
    """Returns the approximate size of a row in bytes."""
    return sum(len(value) if isinstance(value, str) else 64 for value in row.values())


def rows_per_chunk(num_bytes: int, num_rows: int) -> int:
    """Returns the number of rows per chunk for rows of this mean size."""
    return max(1, min(MAX_ROWS, MAX_BYTES * max(num_rows, 1) // max(num_bytes, 1)))


def collect_rows(chunks: Iterable[Chunk]) -> Sequence[Row]:
    """Returns the rows of chunks that can be iterated only once."""
    writer = RowWriter()
    for chunk in chunks:
        writer.add(chunk)
    return writer.close()


def batched_rows(rows: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields lists of at most `MAX_ROWS` rows and of about `MAX_BYTES`, by `size` of each row."""
    batch: list[T] = []
    batch_bytes = 0
    for row in rows:
        batch.append(row)
        batch_bytes += size(row)
        if len(batch) >= MAX_ROWS or batch_bytes >= MAX_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def select_rows(rows: Sequence[Row], is_selected: Any) -> Sequence[Row]:
    """Returns the rows at which a boolean array is true, in order."""
    if not isinstance(rows, ChunkedRows):
        return [row for row, keep in zip(rows, is_selected, strict=True) if keep]

    def selected_chunks() -> Iterator[Chunk]:
        import pyarrow as pa

        start = 0
        for chunk in rows.chunks():
            part = is_selected[start : start + len(chunk)]
            start += len(chunk)
            if isinstance(chunk, list):
                yield [row for row, keep in zip(chunk, part, strict=True) if keep]
            else:
                yield chunk.filter(pa.array(part))

    return collect_rows(selected_chunks())


def column_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the columns of all rows, in order of first occurrence."""
    names: dict[str, None] = {}
    for chunk in chunks_of(rows):
        if not isinstance(chunk, list):
            names |= dict.fromkeys(chunk.column_names)
            continue
        for row in chunk:
            if not names.keys() >= row.keys():
                names |= dict.fromkeys(map(str, row))
    return [*names]
