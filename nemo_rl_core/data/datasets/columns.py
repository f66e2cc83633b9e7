"""Columns of records: chosen by a row format, looked up by path, refused where they are unused."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.names import closest_name
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.chunks import chunks_of, column_names, rows_of
from nemo_rl_core.data.datasets.records import MappedRecords, Records
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

_UNUSED = ("image", "images", "video", "videos", "audio", "audios", "tools")
"""Columns that change what a row asks, and that no stage reads yet."""
_ABSENT = object()


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """The value of a column, or of a dotted path into one; None where there is none.

    Example:
        >>> value_at({"extra_info": {"index": 3}}, "extra_info.index")
        3
        >>> value_at({"answers": {"text": ["Rome", "Roma"]}}, "answers.text.0")
        'Rome'
    """
    found = _at(record, path)
    return None if found is _ABSENT else found


def _at(record: Mapping[str, Any], path: str) -> Any:
    if path in record:
        return record[path]
    value: Any = record
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part, _ABSENT)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _ABSENT
    return value


class RowFaults:
    """Rows that do not fit, named together when all have been read."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._text = ""
        self._numbers: list[int] = []
        self._count = 0

    def each(
        self, read: Callable[[Any], Row | None], records: Records, first: int
    ) -> list[tuple[int, Row]]:
        """Every row as it is read, with its place among these records.

        Args:
            read: Makes a row, or None to leave it out. Raises ValueError for one that does not fit.
            records: Of a chunk.
            first: The number of the first of them.
        """
        found: list[tuple[int, Row]] = []
        for number, record in enumerate(records):
            try:
                row = read(record)
            except ValueError as error:
                self._text = self._text or str(error)
                self._count += 1
                if len(self._numbers) < 6:
                    self._numbers.append(first + number)
                continue
            if row is not None:
                found.append((number, row))
        return found

    def refuse(self) -> None:
        """Raises if rows do not fit.

        Raises:
            DataError: Names the first of them.
        """
        if not self._count:
            return
        others = [str(each) for each in self._numbers[1:]]
        more = f"; {self._count - 1} more do not fit: rows {', '.join(others)}" if others else ""
        raise DataError(
            f"{self._where}: row {self._numbers[0]} {self._text}{more}",
            fix="mend or remove these rows",
        )


def present_columns(records: Records) -> set[str]:
    """The columns that have a value somewhere."""
    found: set[str] = set()
    for chunk in chunks_of(records):
        if not isinstance(chunk, list):
            filled = (n for n in chunk.column_names if chunk.column(n).null_count < len(chunk))
            found.update(filled)
            continue
        for record in chunk:
            if not found.issuperset(record):
                found.update(str(key) for key, value in record.items() if value is not None)
    return found


def chosen_columns(records: Records, form: RowFormat, where: str) -> Records:
    """Records without the dropped columns, and with those that `form.columns` maps.

    A mapped column loses its own name; one that a path reaches into stays.

    Raises:
        DataError: If no row has a named column, or rows have images or tools, which nothing reads.
    """
    names = column_names(records)
    absent = [each for each in form.drop_columns if each not in names]
    absent += [path for path in form.columns if not is_anywhere(path, records)]
    if absent:
        meant = {path: closest_name(path, names) for path in absent}
        hints = [f"{path!r} may be {name!r}" for path, name in meant.items() if name]
        raise DataError(
            f"{where}: no row has the column {' or the column '.join(map(repr, absent))}",
            expected=f"columns of the data in columns and drop_columns: {', '.join(names)[:200]}",
            got=", ".join(absent),
            fix="; ".join(hints) or "correct data.columns or data.drop_columns",
        )
    gone = {*form.drop_columns, *form.columns}
    _refuse_unused(records, {*_UNUSED} & {*names} - gone, where)
    if not gone:
        return records

    def chosen(chunk: "list[Row] | pa.Table") -> "list[Row] | pa.Table":
        if not isinstance(chunk, list) and {*form.columns} <= {*chunk.column_names}:
            kept = {n: chunk.column(n) for n in chunk.column_names if n not in gone}
            kept |= {target: chunk.column(name) for name, target in form.columns.items()}
            return type(chunk).from_arrays([*kept.values()], names=[*kept])
        return [
            {
                **{key: value for key, value in record.items() if key not in gone},
                **{target: value_at(record, path) for path, target in form.columns.items()},
            }
            for record in rows_of(chunk)
        ]

    return MappedRecords(records, chosen)


def is_anywhere(path: str, records: Records) -> bool:
    """Whether any record has a value at a path."""
    return any(
        path in chunk.column_names
        if not isinstance(chunk, list) and (path in chunk.column_names or "." not in path)
        else any(_at(record, path) is not _ABSENT for record in rows_of(chunk))
        for chunk in chunks_of(records)
    )


def _refuse_unused(records: Records, columns: Collection[str], where: str) -> None:
    counts, firsts = dict.fromkeys(columns, 0), dict.fromkeys(columns, 0)
    start = 0
    for chunk in chunks_of(records) if columns else ():
        for column in columns:
            for number, value in enumerate(_values(chunk, column)):
                if _has_content(value):
                    firsts[column] = firsts[column] if counts[column] else start + number
                    counts[column] += 1
        start += len(chunk)
    for column in sorted(columns):
        if counts[column]:
            raise DataError(
                f"{where}: {counts[column]} rows have {column}, which would not reach the model",
                expected="rows of text alone",
                got=f"the column {column}, first in row {firsts[column]} (counted from 0)",
                fix=f"use other data, or train without them: data.drop_columns: [{column}]",
            )


def _values(chunk: "list[Row] | pa.Table", column: str) -> list[Any]:
    if isinstance(chunk, list):
        return [record.get(column) for record in chunk]
    if column not in chunk.column_names or chunk.column(column).null_count == len(chunk):
        return []
    values: list[Any] = chunk.column(column).to_pylist()
    return values


def _has_content(value: Any) -> bool:
    if value is None or isinstance(value, str | bytes | list | dict | tuple):
        return bool(value) and value not in ("[]", "{}", "null")
    return True
