"""Rows a chunk at a time: in memory where they are few, on disk where they are many.

A chunk is a list of rows, or an arrow table where all its values are text. `RowWriter` takes chunks
and gives back a list of up to `MAX_ROWS` rows; what is larger lies in a folder of `tempfile` that
lasts as long as the rows that it holds.
"""

import pickle
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

MAX_ROWS = 65_536
"""Rows of a chunk; a data set of no more is a list."""

MAX_BYTES = 64 * 2**20
"""About the bytes of a chunk of long rows."""

Chunk = "list[Row] | pa.Table"


class ChunkedRows(Sequence[Row]):
    """Rows that can be gone through a chunk at a time, as often as needed."""

    def chunks(self) -> "Iterator[list[Row] | pa.Table]":
        """The rows in their order."""
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
            return [self._at(each) for each in range(*index.indices(len(self)))]
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
    """A file of one chunk."""

    path: Path
    num_rows: int

    def read(self) -> "list[Row] | pa.Table":
        if self.path.suffix == ".pickle":
            # A file of this process alone, in a folder that only its user can open.
            found: list[Row] = pickle.loads(self.path.read_bytes())  # noqa: S301
            return found
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            return pa.ipc.open_file(file).read_all()


class StoredRows(ChunkedRows):
    """Rows in files of `tempfile`, which go with the last object that holds them."""

    def __init__(
        self, pieces: Sequence[_Piece], folder: "tempfile.TemporaryDirectory[str]"
    ) -> None:
        self._pieces, self._folder = pieces, folder
        self._ends = list(accumulate(piece.num_rows for piece in pieces))
        # Rows are mostly asked for one after the other.
        self._read = lru_cache(maxsize=1)(_Piece.read)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def chunks(self) -> "Iterator[list[Row] | pa.Table]":
        """One a file."""
        for piece in self._pieces:
            yield piece.read()

    def _at(self, index: int) -> Row:
        number = bisect_right(self._ends, index)
        start = self._ends[number] - self._pieces[number].num_rows
        chunk = self._read(self._pieces[number])
        return rows_of(chunk[index - start : index - start + 1])[0]


class RowWriter:
    """Collects chunks; beyond `MAX_ROWS` rows, or some chunks of long ones, on disk.

    Args:
        in_memory: Whether few rows become a list.
    """

    def __init__(self, *, in_memory: bool = True) -> None:
        self._in_memory = in_memory
        self._held: list[Any] = []
        self._num_bytes = 0
        self._num_held = 0
        self._pieces: list[_Piece] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, chunk: "list[Row] | pa.Table") -> None:
        """Takes the next rows."""
        if not len(chunk):
            return
        self._held.append(chunk)
        self._num_held += len(chunk)
        self._num_bytes += num_bytes(chunk)
        if self._num_held > MAX_ROWS or self._num_bytes > 2 * MAX_BYTES:
            self._flush()

    def close(self) -> Sequence[Row]:
        """The rows in their order."""
        if self._folder is None and self._in_memory:
            return [row for chunk in self._held for row in rows_of(chunk)]
        self._flush()
        assert self._folder is not None
        return StoredRows(self._pieces, self._folder)

    def _flush(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="nemo_rl_rows_")
        for chunk in _joined(self._held):
            name = f"{len(self._pieces):06d}"
            path = Path(self._folder.name, name)
            if isinstance(chunk, list):
                path = path.with_suffix(".pickle")
                path.write_bytes(pickle.dumps(chunk, protocol=pickle.HIGHEST_PROTOCOL))
            else:
                path = path.with_suffix(".arrow")
                write_arrow([chunk], path)
            self._pieces.append(_Piece(path, len(chunk)))
        self._held, self._num_held, self._num_bytes = [], 0, 0


def _joined(chunks: "Sequence[list[Row] | pa.Table]") -> "Iterator[list[Row] | pa.Table]":
    """Lists one after the other as one list: small files make small chunks."""
    held: list[Row] = []
    for chunk in chunks:
        if isinstance(chunk, list):
            held += chunk
            continue
        if held:
            yield held
            held = []
        yield chunk
    if held:
        yield held


def write_arrow(tables: "Iterable[pa.Table]", path: Path) -> None:
    """Writes tables of one schema, at least one, as one arrow file."""
    import pyarrow as pa

    found = iter(tables)
    first = next(found)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
        writer.write_table(first)
        for table in found:
            writer.write_table(table)


def chunks_of(rows: Sequence[Any]) -> "Iterator[list[Any] | pa.Table]":
    """The chunks of rows of any kind; of a list, its slices."""
    if isinstance(rows, ChunkedRows):
        yield from rows.chunks()
        return
    for start in range(0, len(rows), MAX_ROWS):
        yield list(rows[start : start + MAX_ROWS])


def rows_of(chunk: "list[Row] | pa.Table") -> list[Row]:
    """The rows of a chunk as mappings from columns to values."""
    if isinstance(chunk, list):
        return chunk
    found: list[Row] = chunk.to_pylist()
    return found


def num_bytes(chunk: "list[Row] | pa.Table") -> int:
    """About the bytes of a chunk; of a list, by the text of some rows."""
    if not isinstance(chunk, list):
        return int(chunk.nbytes)
    step = max(1, len(chunk) // 32)
    return step * sum(row_bytes(row) for row in chunk[::step])


def row_bytes(row: Mapping[str, Any]) -> int:
    """About the bytes of a row, by its texts."""
    return sum(len(value) if isinstance(value, str) else 64 for value in row.values())


def written(chunks: "Iterable[list[Row] | pa.Table]") -> Sequence[Row]:
    """The rows of chunks that can be gone through but once."""
    writer = RowWriter()
    for chunk in chunks:
        writer.add(chunk)
    return writer.close()


def in_lists(rows: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Rows in lists of at most `MAX_ROWS`, and of about `MAX_BYTES` by their sizes."""
    held: list[T] = []
    held_bytes = 0
    for row in rows:
        held.append(row)
        held_bytes += size(row)
        if len(held) >= MAX_ROWS or held_bytes >= MAX_BYTES:
            yield held
            held, held_bytes = [], 0
    if held:
        yield held


def taken(rows: Sequence[Row], is_taken: Any) -> Sequence[Row]:
    """The rows at which a boolean array is true, in their order."""
    if not isinstance(rows, ChunkedRows):
        return [row for row, keep in zip(rows, is_taken, strict=True) if keep]

    def found() -> "Iterator[list[Row] | pa.Table]":
        import pyarrow as pa

        start = 0
        for chunk in rows.chunks():
            part = is_taken[start : start + len(chunk)]
            start += len(chunk)
            if isinstance(chunk, list):
                yield [row for row, keep in zip(chunk, part, strict=True) if keep]
            else:
                yield chunk.filter(pa.array(part))

    return written(found())


def column_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of all rows, in the order in which they first come."""
    names: dict[str, None] = {}
    for chunk in chunks_of(rows):
        if not isinstance(chunk, list):
            names |= dict.fromkeys(chunk.column_names)
            continue
        for row in chunk:
            if not names.keys() >= row.keys():
                names |= dict.fromkeys(map(str, row))
    return [*names]
