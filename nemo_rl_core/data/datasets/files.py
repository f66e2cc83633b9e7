"""Data files of the user: jsonl, csv, parquet and arrow files, folders of them, saved data sets.

Files are read without `datasets`, which copies every file into its cache and infers types (an
answer `007` of a csv would become 7). Folders saved by `datasets` are read with it.
"""

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.config.data import FileData
from nemo_rl_core.data.datasets.formats import Recognised, recognise
from nemo_rl_core.data.datasets.hub import records_of
from nemo_rl_core.data.datasets.parts import Parts, without_validation
from nemo_rl_core.errors import DataError

Records = list[dict[str, Any]]


def load(config: FileData, *, seed: int) -> Parts:
    """Reads training and validation rows in the order of their files, by `formats.recognise`.

    Args:
        config: The files, and how their columns are read.
        seed: For held-out rows, if the config has no validation file.

    Raises:
        DataError: When a file is missing, cannot be read, or is in no known format.
    """

    train = read_split(config, config.train)
    if config.validation is None:
        return without_validation(
            Parts(train.rows, None, train.read_as),
            fraction=config.validation_fraction,
            seed=seed,
            where=config.train,
        )
    return Parts(train.rows, read_split(config, config.validation).rows, train.read_as)


def read_split(config: FileData, name: str) -> Recognised:
    """The rows of one file or folder, as the config reads columns."""
    records = read_records(Path(name).expanduser())
    return recognise(records, where=name, task="file", form=config.reading())


def read_records(path: Path) -> Records:
    """Reads the records of a file, of a folder saved by `datasets`, or of all files of a folder.

    Args:
        path: Files of a folder are read in the order of their names and must have one suffix.

    Raises:
        DataError: When it is missing or cannot be read, or holds several kinds of files.
    """
    if not path.is_dir():
        return _read_file(path)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(part.name for part in path.iterdir() if part.is_dir())
        raise DataError(
            f"the folder {path} holds several splits",
            expected="the folder of one split, or DataModule.of(folder)",
            got=f"splits {', '.join(splits)}",
            fix="name the folder of a split, such as .../train",
        )
    if (path / "state.json").is_file():
        return _read_saved(path)
    return [record for file in data_files(path) for record in _read_file(file)]


def data_files(folder: Path) -> list[Path]:
    """The data files of a folder, sorted by name.

    Raises:
        DataError: When there are none, or their suffixes differ.
    """
    found = sorted(file for file in folder.iterdir() if file.suffix.lower() in _READERS)
    suffixes = sorted({file.suffix.lower() for file in found})
    if len(suffixes) != 1:
        raise DataError(
            f"the folder {folder} cannot be read as one data set",
            expected=f"files of one suffix of {', '.join(_READERS)}, or a saved data set",
            got=f"files of {' and '.join(suffixes)}" if suffixes else "no such file",
            fix="name one file, or keep the data in a folder of its own",
        )
    return found


def _read_file(path: Path) -> Records:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"the data file {path} has a suffix that is not known",
            expected=f"one of {', '.join(_READERS)}",
            got=path.suffix or "none",
            fix="convert it, or rename it if it is one of these",
        )
    if not path.is_file():
        raise DataError(
            f"the data file {path} does not exist",
            expected="a file, named absolutely or from the current directory",
            got="nothing there",
            fix="correct data.train or data.validation",
        )
    return reader(path)


def _read_jsonl(path: Path) -> Records:
    records = []
    # `splitlines` also breaks at characters that are legal inside a JSON string.
    for number, line in enumerate(_decoded(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=_object_of_unique_keys)
        except (ValueError, RecursionError) as error:
            raise _unreadable(path, f"line {number}: {error}") from error
        if not isinstance(record, dict):
            raise _unreadable(path, f"line {number} holds {line.strip()[:60]}, not an object")
        records.append(record)
    return records


def _read_csv(path: Path) -> Records:
    # The default limit of 128 KiB per field is too small for long completions.
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(_decoded(path).splitlines(keepends=True), strict=True)
    try:
        _refuse_repeated(path, reader.fieldnames or [])
        # Fields past the header's land under None.
        return [{k: v for k, v in record.items() if k is not None} for record in reader]
    except csv.Error as error:
        raise _unreadable(path, f"line {reader.line_num}: {error}") from error


def _read_parquet(path: Path) -> Records:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        records: Records = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, str(error)) from error
    return records


def _read_arrow(path: Path) -> Records:
    import pyarrow as pa

    try:
        with pa.OSFile(str(path)) as file:
            # `datasets` writes the stream form, and Feather (version 2) is the file form.
            is_file_form = file.read(6) == b"ARROW1"
            file.seek(0)
            open_form = pa.ipc.open_file if is_file_form else pa.ipc.open_stream
            table = open_form(file).read_all()
            _refuse_repeated(path, table.column_names)
            records: Records = table.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, str(error)) from error
    return records


def _read_saved(folder: Path) -> Records:
    from datasets import load_from_disk

    try:
        return records_of(load_from_disk(str(folder)))
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(folder, str(error)) from error


_READERS: dict[str, Callable[[Path], Records]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}


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


def _decoded(path: Path) -> str:
    try:
        # utf-8-sig drops the byte order mark of spreadsheets; newlines stay as they are.
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, reason: str) -> DataError:
    lines = path.suffix.lower() in (".jsonl", ".csv")
    return DataError(
        f"the data file {path} cannot be read",
        expected=f"UTF-8 {path.suffix} with one row a line" if lines else None,
        got=reason[:200],
        fix="mend the file, or write it again",
    )
