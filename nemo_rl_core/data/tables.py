"""Checked rows as arrow tables: few rows stay in memory, many are memory-mapped from disk.

A frame of many rows is a view of a memory-mapped file: its text columns need no additional memory.
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
    chunks_of,
    rows_of,
    rows_per_chunk,
    write_arrow,
)
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class TableWriter:
    """Collects tables of checked rows with possibly different number types."""

    def __init__(self) -> None:
        self._rows = RowWriter(in_memory=False)
        self._fields: dict[str, pa.DataType] = {}

    def add(self, table: "pa.Table") -> None:
        """Appends rows."""
        for name, kind in zip(table.schema.names, table.schema.types, strict=True):
            self._fields[name] = _wider(self._fields.get(name, kind), kind)
        self._rows.add(table)

    def close(self) -> "pa.Table":
        """Returns all rows in order, memory-mapped."""
        import pyarrow as pa

        schema = pa.schema(list(self._fields.items()))
        return memory_mapped(_as_schema(chunk, schema) for chunk in chunks_of(self._rows.close()))


def _wider(one: "pa.DataType", other: "pa.DataType") -> "pa.DataType":
    """Returns the type of both, or the first one, such as that of a margin before `true`.

    `pa.unify_schemas` refuses numbers with booleans or texts, which pass the checks of rows.
    """
    import pyarrow as pa

    if one == other or pa.types.is_null(other):
        return one
    is_mixed = pa.types.is_integer(one) and pa.types.is_floating(other)
    return other if is_mixed or pa.types.is_null(one) else one


def _as_schema(table: "pa.Table", schema: "pa.Schema") -> "pa.Table":
    """Casts a table to a schema; missing columns are null."""
    import pyarrow as pa

    if table.schema == schema:
        return table
    columns = [
        table.column(name).cast(kind)
        if name in table.column_names
        else pa.nulls(len(table), type=kind)
        for name, kind in zip(schema.names, schema.types, strict=True)
    ]
    return pa.table(columns, schema=schema)


def memory_mapped(tables: "Iterator[pa.Table]") -> "pa.Table":
    """Writes one or more tables of the same schema to an unlinked file and maps it into memory."""
    import pyarrow as pa

    with tempfile.TemporaryDirectory(prefix="nemo_rl_rows_") as folder:
        path = Path(folder, "rows.arrow")
        write_arrow(tables, path)
        with path.open("rb") as file:
            region = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    # The file is freed with the last buffer of the region.
    return pa.ipc.open_file(pa.py_buffer(region)).read_all()


def select_table(table: "pa.Table", is_selected: Any) -> "pa.Table":
    """Returns the rows at which a boolean array is true; of many rows, memory-mapped."""
    import pyarrow as pa

    if len(table) <= chunks.MAX_ROWS:
        return table.filter(pa.array(is_selected))
    size = chunks.MAX_ROWS
    return memory_mapped(
        part.filter(pa.array(is_selected[number * size : (number + 1) * size]))
        for number, part in enumerate(TableRows(table).chunks())
    )


class TableRows(ChunkedRows):
    """Rows of a table, which are converted on access."""

    def __init__(self, table: "pa.Table") -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def chunks(self) -> "Iterator[pa.Table]":
        """Yields slices of the table."""
        for start in range(0, len(self._table), chunks.MAX_ROWS):
            yield self._table.slice(start, chunks.MAX_ROWS)

    def _at(self, index: int) -> Row:
        return rows_of(self._table.slice(index, 1))[0]


def rows_of_frame(frame: "pd.DataFrame") -> Sequence[Row]:
    """Returns the rows of a frame: a list of few rows, or `TableRows` of many."""
    from nemo_rl_core.data.frames import records_of

    return records_of(frame) if len(frame) <= chunks.MAX_ROWS else TableRows(table_of(frame))


def rechunked(tables: "Iterator[pa.Table]", num_rows: int) -> "Iterator[pa.Table]":
    """Yields the same rows in tables of `num_rows`; the last one may be smaller."""
    import pyarrow as pa

    pending: list[pa.Table] = []
    count = 0
    for table in tables:
        pending.append(table)
        count += len(table)
        while count >= num_rows:
            joined = pa.concat_tables(pending)
            yield joined.slice(0, num_rows)
            pending, count = [joined.slice(num_rows)], count - num_rows
    if count:
        yield pa.concat_tables(pending)


def rows_per_group(tables: "Iterator[pa.Table]") -> int:
    """Returns the rows per row group, from the texts only, so that equal rows give equal files."""
    import pyarrow as pa
    import pyarrow.compute as pc

    num_rows, num_bytes = 0, 0
    for table in tables:
        num_rows += len(table)
        for column in table.columns:
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                num_bytes += pc.sum(pc.binary_length(column)).as_py() or 0
    return rows_per_chunk(num_bytes, num_rows)


def table_of(frame: "pd.DataFrame") -> "pa.Table":
    """Converts a frame to a table without pandas metadata, which depends on the pandas version."""
    import pyarrow as pa

    return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
