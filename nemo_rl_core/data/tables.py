"""Checked rows as arrow tables: in memory where they are few, mapped from disk where they are many.

A frame of many rows is a view of a mapped file: its columns of text take no memory of their own.
"""

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.data import chunks
from nemo_rl_core.data.chunks import (
    ChunkedRows,
    RowWriter,
    StoredRows,
    rows_of,
    taken,
    write_arrow,
)
from nemo_rl_core.data.table_schemas import as_schema, table_of, tables_of, wider
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class CheckedRows(ChunkedRows):
    """Rows that have passed their checks, as tables of one schema.

    Args:
        rows: The frame of all rows, or stored tables, whose number types may differ.
        schema: Of all stored tables.
    """

    def __init__(
        self, rows: "pd.DataFrame | StoredRows", schema: "pa.Schema | None" = None
    ) -> None:
        self._rows, self._schema = rows, schema

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in their order."""
        if self._schema is not None:
            return list(self._schema.names)
        assert not isinstance(self._rows, StoredRows)
        return [str(name) for name in self._rows.columns]

    def chunks(self) -> "Iterator[pa.Table]":
        """Tables of one schema."""
        if not isinstance(self._rows, StoredRows):
            yield from tables_of(self._rows)
            return
        assert self._schema is not None, "stored rows have a schema"
        for chunk in self._rows.chunks():
            assert not isinstance(chunk, list), "checked rows are stored as tables"
            yield as_schema(chunk, self._schema)

    def taken(self, is_taken: "Any") -> "CheckedRows":
        """The rows at which a boolean array is true."""
        if not isinstance(self._rows, StoredRows):
            return CheckedRows(self._rows[is_taken].reset_index(drop=True))
        found = taken(self, is_taken)
        if isinstance(found, StoredRows):
            return CheckedRows(found, self._schema)
        import pyarrow as pa

        return CheckedRows(pa.Table.from_pylist(found, schema=self._schema).to_pandas())

    def with_limit(self, max_tokens: int) -> "CheckedRows":
        """The rows with the column `max_tokens`, the same in all."""
        if not isinstance(self._rows, StoredRows):
            return CheckedRows(self._rows.assign(max_tokens=max_tokens))
        import pyarrow as pa

        assert self._schema is not None, "stored rows have a schema"
        names = [*dict.fromkeys([*self._schema.names, "max_tokens"])]
        writer = TableWriter()
        for table in self.chunks():
            columns = {name: table.column(name) for name in table.column_names}
            columns["max_tokens"] = pa.repeat(pa.scalar(max_tokens, pa.int64()), len(table))
            writer.add(pa.table({name: columns[name] for name in names}))
        return writer.close()

    def head(self, num_rows: int) -> "pd.DataFrame":
        """The first rows as a frame."""
        if not isinstance(self._rows, StoredRows):
            return self._rows.head(num_rows)
        frame: pd.DataFrame = next(self.chunks()).slice(0, num_rows).to_pandas()
        return frame

    def frame(self) -> "pd.DataFrame":
        """The rows as a frame; of many, a view of a file that exists as long as the frame."""
        if not isinstance(self._rows, StoredRows):
            return self._rows
        frame: pd.DataFrame = mapped(self.chunks()).to_pandas()
        return frame


class TableWriter:
    """Collects the tables of checked rows, whose types of numbers may differ."""

    def __init__(self) -> None:
        self._rows = RowWriter(in_memory=False)
        self._fields: dict[str, pa.DataType] = {}

    def add(self, table: "pa.Table") -> None:
        """Takes the next rows."""
        for name, kind in zip(table.schema.names, table.schema.types, strict=True):
            self._fields[name] = wider(self._fields.get(name, kind), kind)
        self._rows.add(table)

    def close(self) -> CheckedRows:
        """The rows in their order."""
        import pyarrow as pa

        stored = self._rows.close()
        assert isinstance(stored, StoredRows)
        return CheckedRows(stored, pa.schema(list(self._fields.items())))


def mapped(tables: "Iterator[pa.Table]") -> "pa.Table":
    """Tables of one schema, at least one, as a table that is mapped from a file without a name."""
    import pyarrow as pa

    with tempfile.TemporaryDirectory(prefix="nemo_rl_rows_") as folder:
        path = Path(folder, "rows.arrow")
        write_arrow(tables, path)
        with path.open("rb") as file:
            region = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    # The file is gone when the last buffer of the region is.
    return pa.ipc.open_file(pa.py_buffer(region)).read_all()


class TableRows(ChunkedRows):
    """The rows of a table, made when they are asked for."""

    def __init__(self, table: "pa.Table") -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def chunks(self) -> "Iterator[pa.Table]":
        """Slices of the table."""
        for start in range(0, len(self._table), chunks.MAX_ROWS):
            yield self._table.slice(start, chunks.MAX_ROWS)

    def _at(self, index: int) -> Row:
        return rows_of(self._table.slice(index, 1))[0]


def rows_of_frame(frame: "pd.DataFrame") -> Sequence[Row]:
    """The rows of a frame: a list of few, made when they are asked for of many."""
    from nemo_rl_core.data.frames import records_of

    return records_of(frame) if len(frame) <= chunks.MAX_ROWS else TableRows(table_of(frame))


def rechunked(tables: "Iterator[pa.Table]", num_rows: int) -> "Iterator[pa.Table]":
    """The same rows in tables of `num_rows` each, the last one smaller."""
    import pyarrow as pa

    held: list[pa.Table] = []
    count = 0
    for table in tables:
        held.append(table)
        count += len(table)
        while count >= num_rows:
            joined = pa.concat_tables(held)
            yield joined.slice(0, num_rows)
            held, count = [joined.slice(num_rows)], count - num_rows
    if count:
        yield pa.concat_tables(held)


def rows_a_group(tables: "Iterator[pa.Table]") -> int:
    """How many rows a group of a file has: by their texts, so that equal rows give equal files."""
    import pyarrow as pa
    import pyarrow.compute as pc

    num_rows, num_bytes = 0, 0
    for table in tables:
        num_rows += len(table)
        for column in table.columns:
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                num_bytes += pc.sum(pc.binary_length(column)).as_py() or 0
    return max(1, min(chunks.MAX_ROWS, chunks.MAX_BYTES * max(num_rows, 1) // max(num_bytes, 1)))
