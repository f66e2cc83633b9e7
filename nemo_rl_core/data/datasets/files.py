"""Rows of the user's own, from jsonl, csv or parquet.

Read without `datasets`: it copies every file into a cache of its own, and guesses types (an answer
`007` of a csv would become 7).
"""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_rl_core.config.data import FileData
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

_REQUIRED = ("prompt", "answer")


def load(config: FileData) -> tuple[list[Row], list[Row]]:
    """Training rows and validation rows, in the order of their files.

    Columns that a file leaves out are filled: `id` with the row's number, `completion` with the
    answer, `task` with `file`, `metadata` with `{}`. Numbers become text; all else is left as it is
    for `schemas.validate_rows` to judge. Columns of other names are ignored.

    Raises:
        DataError: When a file is missing, cannot be read, or lacks `prompt` or `answer`.
    """
    return _load(Path(config.train)), _load(Path(config.validation))


def _load(path: Path) -> list[Row]:
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
            got="a folder" if path.is_dir() else "nothing there",
            fix="correct data.train or data.validation",
        )
    records = reader(path)
    present = {column for record in records for column in record}
    missing = [column for column in _REQUIRED if column not in present]
    if records and missing:
        raise DataError(
            f"the data file {path} lacks the column {' and the column '.join(missing)}",
            expected=f"the columns {' and '.join(_REQUIRED)}",
            got=", ".join(sorted(map(str, present)))[:160] or "no columns",
            fix="rename the columns",
        )
    return [_row(number, record) for number, record in enumerate(records)]


def _row(number: int, record: dict[str, Any]) -> Row:
    answer = _text(record.get("answer"))
    return {
        "id": _filled(record.get("id"), str(number)),
        "prompt": _text(record.get("prompt")),
        "answer": answer,
        "completion": _filled(record.get("completion"), answer),
        "task": _filled(record.get("task"), "file"),
        "metadata": _filled(record.get("metadata"), "{}"),
    }


def _filled(value: Any, default: Any) -> Any:
    return default if value is None or value == "" else _text(value)


def _text(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return value


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    records = []
    # Not `splitlines`, which also breaks at characters that are legal inside a JSON string.
    for number, line in enumerate(_decoded(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _unreadable(path, f"line {number}: {error}") from error
        if not isinstance(record, dict):
            raise _unreadable(path, f"line {number} holds {line.strip()[:60]}, not an object")
        records.append(record)
    return records


def _read_csv(path: Path) -> list[dict[str, Any]]:
    # The default limit of 128 KiB a field is not one that this project sets.
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(_decoded(path).splitlines(keepends=True), strict=True)
    try:
        # Fields past the header's land under None.
        return [{k: v for k, v in record.items() if k is not None} for record in reader]
    except csv.Error as error:
        raise _unreadable(path, f"line {reader.line_num}: {error}") from error


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        records: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, str(error)) from error
    return records


_READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _decoded(path: Path) -> str:
    try:
        # utf-8-sig drops the mark that spreadsheets put in front; newlines stay as they are.
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, reason: str) -> DataError:
    return DataError(
        f"the data file {path} cannot be read",
        expected=f"UTF-8 {path.suffix} with one row a line" if path.suffix != ".parquet" else None,
        got=reason[:200],
        fix="mend the file, or write it again",
    )
