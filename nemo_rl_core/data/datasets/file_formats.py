"""Records of one jsonl, csv, parquet or arrow file, or saved data set; faults name their line."""

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.data.chunks import in_lists, row_bytes, written
from nemo_rl_core.data.datasets.jsonl import read_flat_jsonl
from nemo_rl_core.data.datasets.records import (
    ArrowRecords,
    Records,
    of_dataset,
    rows_a_chunk,
)
from nemo_rl_core.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


_LARGE = 2**23
"""Bytes from which a file is worth a pass that finds whether arrow may read it."""


def read_jsonl(path: Path, limit: int | None) -> Records:
    """One object a line."""
    if limit is None and path.stat().st_size >= _LARGE:
        flat = read_flat_jsonl(path)
        if flat is not None:
            return flat
    # A text file would also break lines at characters that are legal inside a JSON string.
    lines = enumerate(_decoded_lines(path), start=1)
    filled = islice(((number, line) for number, line in lines if line.strip()), limit)
    decode = json.JSONDecoder(object_pairs_hook=_object_of_unique_keys).decode

    def record(number: int, line: str) -> dict[str, Any]:
        try:
            found = decode(line)
        except (ValueError, RecursionError) as error:
            raise _unreadable(path, f"line {number}: {error}") from error
        if not isinstance(found, dict):
            raise _unreadable(path, f"line {number} holds {line.strip()[:60]}, not an object")
        return found

    chunks = in_lists(filled, lambda each: len(each[1]))
    return written([record(*each) for each in chunk] for chunk in chunks)


def read_csv(path: Path, limit: int | None) -> Records:
    """One record a line, under the names of the first."""
    return written(in_lists(islice(_csv_rows(path), limit), row_bytes))


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    # The default limit of 128 KiB per field is too small for long completions.
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            _refuse_repeated(path, reader.fieldnames or [])
            for record in reader:
                # Fields past the header's land under None.
                yield {key: value for key, value in record.items() if key is not None}
        except csv.Error as error:
            raise _unreadable(path, f"line {reader.line_num}: {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, str(error)) from error


def read_parquet(path: Path, limit: int | None) -> Records:
    """One record a row, read in batches."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def opened() -> Any:
        # Neither a whole row group nor a whole file is held at once.
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=2**20)

    def tables(size: int) -> "Iterator[pa.Table]":
        try:
            with opened() as file:
                for batch in file.iter_batches(size):
                    yield pa.Table.from_batches([batch])
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(path, str(error)) from error

    try:
        with opened() as file:
            about = file.metadata
            if _repeated(file.schema_arrow.names):
                pq.read_table(path)  # raises, and names the columns
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, str(error)) from error
    groups = (about.row_group(number) for number in range(about.num_row_groups))
    size = rows_a_chunk(sum(group.total_byte_size for group in groups), about.num_rows)
    size = size if limit is None else max(1, min(size, limit))
    return ArrowRecords(about.num_rows, lambda: tables(size), limit)


def read_arrow(path: Path, limit: int | None) -> Records:
    """One record a row of a file or stream."""
    import pyarrow as pa

    def tables() -> "Iterator[pa.Table]":
        try:
            with pa.memory_map(str(path)) as file:
                # `datasets` writes the stream form, and Feather (version 2) is the file form.
                is_file_form = file.read(6) == b"ARROW1"
                file.seek(0)
                if not is_file_form:
                    stream = pa.ipc.open_stream(file)
                    _refuse_repeated(path, stream.schema.names)
                    yield from (pa.Table.from_batches([batch]) for batch in stream)
                    return
                found = pa.ipc.open_file(file)
                _refuse_repeated(path, found.schema.names)
                for number in range(found.num_record_batches):
                    yield pa.Table.from_batches([found.get_batch(number)])
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(path, str(error)) from error

    return ArrowRecords(sum(map(len, tables())), tables, limit)


def read_saved(folder: Path, limit: int | None) -> Records:
    """What `datasets.Dataset.save_to_disk` has written."""
    from datasets import load_from_disk

    try:
        return of_dataset(load_from_disk(str(folder)), limit)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(folder, str(error)) from error


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object and refuses duplicate keys.

    Raises:
        ValueError: If a key occurs twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {_repeated([key for key, _ in pairs])[0]!r} occurs twice")
    return found


def _refuse_repeated(path: Path, columns: Sequence[str]) -> None:
    if twice := _repeated(columns):
        raise DataError(
            f"the data file {path} has two columns {' and two columns '.join(map(repr, twice))}",
            expected="each column once, since one value of a row would hide the other",
            got=", ".join(columns)[:160],
            fix="rename or remove one of them",
        )


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _decoded_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, without the byte order mark of spreadsheets."""
    number = 1
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield line.removesuffix(b"\n").decode("utf-8" if number > 1 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"line {number}: {error}") from error
    except OSError as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, reason: str) -> DataError:
    lines = path.suffix.lower() in (".jsonl", ".csv")
    return DataError(
        f"the data file {path} cannot be read",
        expected=f"UTF-8 {path.suffix} with one row a line" if lines else None,
        got=reason[:200],
        fix="mend the file, or write it again",
    )
