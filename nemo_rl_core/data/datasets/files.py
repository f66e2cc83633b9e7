"""Data files on this machine or in an object store: jsonl, json, csv, parquet and arrow files,
folders of them, and saved data sets.

Files are read without `datasets`, which copies every file into its cache and infers types (an
answer `007` in a csv would become 7). Folders saved by `datasets` are read with it.
"""

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.data import FileData
from nemo_rl_core.data.chunks import batched_rows, collect_rows, row_bytes, rows_per_chunk
from nemo_rl_core.data.datasets.formats import recognize
from nemo_rl_core.data.datasets.parts import Parts, Recognized, without_validation
from nemo_rl_core.data.datasets.records import (
    LazyRecords,
    Records,
    arrow_records,
    dataset_records,
    joined,
)
from nemo_rl_core.errors import DataError
from nemo_rl_core.store import remote
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.waiting import waiting

if TYPE_CHECKING:
    import pyarrow as pa


def load(config: FileData, *, seed: int) -> Parts:
    """Reads training and validation rows in file order and converts them by `formats.recognize`."""
    train = read_split(config, config.train)
    if config.validation is None:
        return without_validation(
            train, fraction=config.validation_fraction, seed=seed, where=config.train
        )
    return Parts(train.rows, read_split(config, config.validation).rows, train.read_as)


def read_split(config: FileData, name: str) -> Recognized:
    """Reads the rows of one file or folder by the config's row format."""
    records = read_named(name, limit=config.max_rows)
    return recognize(
        records, where=name, task="file", form=config.reading(), drops_invalid=config.drops_invalid
    )


def read_named(name: str, *, limit: int | None = None) -> Records:
    """Reads the records of a local path, like `read_records`, or of an object store's address."""
    if remote.is_remote(name):
        return read_files(_fetched(name), limit)
    return read_records(Path(name).expanduser(), limit)


def _fetched(address: str) -> list[Path]:
    folder = Store.default().cache / "remote"
    objects = remote.listing(address)
    paths = [
        resolve_below(
            folder / item.digest[:32],
            PurePosixPath(item.address).name,
            source=f"the listing of {address}",
        )
        for item in objects
    ]
    missing = [
        (item, path) for item, path in zip(objects, paths, strict=True) if not path.is_file()
    ]
    if missing:
        total = sum(item.size for item, _ in missing)
        with waiting(f"fetching {address}", total=total, unit="bytes") as wait:
            for item, path in missing:
                remote.fetch(item, path)
                wait.advance(item.size)
    return paths


def read_records(path: Path, limit: int | None = None) -> Records:
    """Reads the records of a file, of a folder saved by `datasets`, or of all files of a folder.

    Args:
        path: A file or folder. Files of a folder are read in order of their names and must have
            the same suffix.
        limit: Maximum number of records; later records are not read. None reads all.

    Raises:
        DataError: When it cannot be read; for parquet and arrow files, during iteration.
    """
    if not path.is_dir():
        return _read_file(path, limit)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(part.name for part in path.iterdir() if part.is_dir())
        raise DataError(
            f"the folder {path} contains several splits",
            expected="the folder of one split, or DataModule.of(folder)",
            got=f"splits {', '.join(splits)}",
            fix="name the folder of a split, such as .../train",
        )
    if (path / "state.json").is_file():
        return read_saved(path, limit)
    return read_files(data_files(path), limit)


def read_files(paths: Sequence[Path], limit: int | None = None) -> Records:
    """Reads the records of files in order; files beyond the limit are not opened."""
    parts: list[Records] = []
    for path in paths:
        remaining = None if limit is None else limit - sum(map(len, parts))
        if remaining is not None and remaining <= 0:
            break
        parts.append(_read_file(path, remaining))
    return joined(parts)


def data_files(folder: Path) -> list[Path]:
    """Returns the data files of a folder, sorted by name."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _READERS)
    # Next to other data files, .json files only describe them, like dataset_infos.json.
    files = [file for file in files if file.suffix.lower() != ".json"] or files
    suffixes = sorted({file.suffix.lower() for file in files})
    if len(suffixes) != 1:
        raise DataError(
            f"the folder {folder} cannot be read as one data set",
            expected=f"files with one suffix of {', '.join(_READERS)}, or a saved data set",
            got=f"files with {' and '.join(suffixes)}" if suffixes else "no such file",
            fix="name one file, or keep the data in a separate folder",
        )
    return files


def _read_file(path: Path, limit: int | None) -> Records:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"the data file {path} has an unknown suffix",
            expected=f"one of {', '.join(_READERS)}",
            got=path.suffix or "none",
            fix="convert it, or rename it if it is one of these",
        )
    if not path.is_file():
        raise DataError(
            f"the data file {path} does not exist",
            expected="an absolute path, or one relative to the current directory",
            got="no file at this path",
            fix="correct the path: data.train or data.validation of a recipe, dataset or "
            "eval_dataset in Python",
        )
    return reader(path, limit)


_LARGE = 2**23
"""Minimum bytes of a file for which the extra pass of `read_flat_jsonl` pays off."""
_JSONL_BLOCK = 2**22


def read_jsonl(path: Path, limit: int | None) -> Records:
    """Reads one object per line."""
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
            parsed = decode(line)
        except (ValueError, RecursionError) as error:
            raise _unreadable(path, f"line {number}: {error}") from error
        if not isinstance(parsed, dict):
            raise _unreadable(path, f"line {number} is {line.strip()[:60]}, not an object")
        return parsed

    chunks = batched_rows(filled, lambda numbered: len(numbered[1]))
    return collect_rows([record(*numbered) for numbered in chunk] for chunk in chunks)


def read_flat_jsonl(path: Path) -> LazyRecords | None:
    """Reads a file whose objects all have the same keys, with text values.

    Arrow reads only such files in the same way as Python's decoder, which is several times slower
    but keeps every type and reports the line of an error.

    Returns:
        The records; None for any other file.
    """
    import pyarrow as pa

    try:
        num_rows = 0
        for table in _jsonl_tables(path):
            if any(field.type != pa.string() for field in table.schema):
                return None  # another type, or a text that arrow reads as a date
            if any(column.null_count for column in table.columns):
                return None
            table.validate(full=True)
            num_rows += len(table)
        has_one_per_line = num_rows == _num_object_lines(path)
    except (OSError, pa.ArrowException):
        return None
    return arrow_records(num_rows, lambda: _jsonl_tables(path)) if has_one_per_line else None


def _jsonl_tables(path: Path) -> "Iterator[pa.Table]":
    import pyarrow as pa
    import pyarrow.json as paj

    options = paj.ReadOptions(use_threads=False, block_size=_JSONL_BLOCK)
    with paj.open_json(str(path), read_options=options) as reader:
        for batch in reader:
            yield pa.Table.from_batches([batch])


def _num_object_lines(path: Path) -> int:
    """Counts non-blank lines; returns -1 if one of them does not begin and end with a brace.

    Arrow accepts several objects per line, and objects over several lines.
    """
    num_lines = 0
    with path.open("rb") as file:
        for line in file:
            text = line.strip()
            if text:
                if text[:1] != b"{" or text[-1:] != b"}":
                    return -1
                num_lines += 1
    return num_lines


def read_json(path: Path, limit: int | None) -> Records:
    """Reads an array of objects, an object with such an array in `data`, or one object per line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip()[:1] not in ("[", "{"):
            raise ValueError("it begins with neither an array nor an object")
        parsed = json.JSONDecoder(object_pairs_hook=_object_of_unique_keys).decode(text.strip())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return read_jsonl(path, limit)
        raise _unreadable(path, str(error)) from error
    if isinstance(parsed, dict):
        if not isinstance(parsed.get("data"), list):
            return read_jsonl(path, limit)
        parsed = parsed["data"]
    for number, record in enumerate(parsed):
        if not isinstance(record, dict):
            raise _unreadable(path, f"element {number} is {str(record)[:60]}, not an object")
    return collect_rows(batched_rows(islice(parsed, limit), row_bytes))


def read_csv(path: Path, limit: int | None) -> Records:
    """Reads one record per line, with column names from the first line."""
    return collect_rows(batched_rows(islice(_csv_rows(path), limit), row_bytes))


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    # The default limit of 128 KiB per field is too small for long completions.
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            _refuse_repeated(path, reader.fieldnames or [])
            for record in reader:
                # Fields beyond the header are under None.
                yield {key: value for key, value in record.items() if key is not None}
        except csv.Error as error:
            raise _unreadable(path, f"line {reader.line_num}: {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, str(error)) from error


def read_parquet(path: Path, limit: int | None) -> Records:
    """Reads one record per row, in batches."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def opened() -> Any:
        # Without these options, a full row group would be in memory.
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
            metadata = file.metadata
            if _repeated(file.schema_arrow.names):
                pq.read_table(path)  # raises, and names the columns
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, str(error)) from error
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    size = rows_per_chunk(sum(group.total_byte_size for group in groups), metadata.num_rows)
    size = size if limit is None else max(1, min(size, limit))
    return arrow_records(metadata.num_rows, lambda: tables(size), limit)


def read_arrow(path: Path, limit: int | None) -> Records:
    """Reads one record per row of an arrow file or stream."""
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
                batches = pa.ipc.open_file(file)
                _refuse_repeated(path, batches.schema.names)
                for number in range(batches.num_record_batches):
                    yield pa.Table.from_batches([batches.get_batch(number)])
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(path, str(error)) from error

    return arrow_records(sum(map(len, tables())), tables, limit)


def read_saved(folder: Path, limit: int | None) -> Records:
    """Reads a folder that `datasets.Dataset.save_to_disk` wrote."""
    from datasets import load_from_disk

    try:
        return dataset_records(load_from_disk(str(folder)), limit)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(folder, str(error)) from error


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        raise ValueError(f"the key {_repeated([key for key, _ in pairs])[0]!r} occurs twice")
    return parsed


def _refuse_repeated(path: Path, columns: Sequence[str]) -> None:
    if repeated := _repeated(columns):
        names = " and two columns ".join(map(repr, repeated))
        raise DataError(
            f"the data file {path} has two columns {names}",
            expected="unique column names, since one value of a row would replace the other",
            got=", ".join(columns)[:160],
            fix="rename or remove one of them",
        )


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _decoded_lines(path: Path) -> Iterator[str]:
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
        expected=f"UTF-8 {path.suffix} with one row per line" if lines else None,
        got=reason[:200],
        fix="correct the file, or write it again",
    )


_READERS: dict[str, Callable[[Path, int | None], Records]] = {
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".json": read_json,
}
