"""Schemas of arrow tables: one for all chunks of a data set."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_core.data import chunks

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def wider(one: "pa.DataType", other: "pa.DataType") -> "pa.DataType":
    """The type that holds the values of both types."""
    import pyarrow as pa

    if one == other or pa.types.is_null(other):
        return one
    is_mixed = pa.types.is_integer(one) and pa.types.is_floating(other)
    return other if is_mixed or pa.types.is_null(one) else one


def as_schema(table: "pa.Table", schema: "pa.Schema") -> "pa.Table":
    """A table with the columns of a schema, null where it lacks them."""
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


def table_of(frame: "pd.DataFrame") -> "pa.Table":
    """A frame as a table without pandas' metadata, which depends on its version."""
    import pyarrow as pa

    return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)


def tables_of(frame: "pd.DataFrame") -> "Iterator[pa.Table]":
    """The rows of a frame in tables of at most `MAX_ROWS`, of one schema."""
    if len(frame) <= chunks.MAX_ROWS:
        yield table_of(frame)
        return
    whole = table_of(frame)  # shares the memory of texts
    for start in range(0, len(frame), chunks.MAX_ROWS):
        yield whole.slice(start, chunks.MAX_ROWS)
