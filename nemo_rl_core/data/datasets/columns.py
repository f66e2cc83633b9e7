"""Columns of records: selected by a row format, looked up by path, refused if they are unused."""

from array import array
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nemo_rl_core.config.names import closest_name
from nemo_rl_core.config.row_format import KNOWN_COLUMNS, RowFormat
from nemo_rl_core.config.row_policy import MAX_DROPPED
from nemo_rl_core.data.chunks import Chunk, chunks_of, column_names, rows_of
from nemo_rl_core.data.datasets.content import refuse_lost
from nemo_rl_core.data.datasets.records import Records, mapped
from nemo_rl_core.data.frames import invalid_fix, summarize_faults
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

_UNUSED = ("image", "images", "video", "videos", "audio", "audios")
"""Columns that are part of the question and that no stage reads yet."""
_ABSENT = object()
_MAX_FAULTS = 1000


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """Returns the value of a column, or of a dotted path into one; None if there is none.

    Example:
        >>> value_at({"extra_info": {"index": 3}}, "extra_info.index")
        3
        >>> value_at({"answers": {"text": ["Rome", "Roma"]}}, "answers.text.0")
        'Rome'
    """
    value = _at(record, path)
    return None if value is _ABSENT else value


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
    """Collects rows that do not fit their format and reports them after all rows are read.

    Args:
        drops: Whether such rows are dropped and counted, up to a share of the rows.
        lost: Rows to drop, by index, with the column that would not reach the model.
    """

    def __init__(
        self, where: str, *, drops: bool = False, lost: Mapping[int, str] | None = None
    ) -> None:
        self._where, self.drops, self.lost = where, drops, lost or {}
        self._rows: dict[str, array[int]] = {}

    def add(self, fault: str, number: int) -> None:
        """Records the fault of a row, by its index."""
        if fault not in self._rows and len(self._rows) >= _MAX_FAULTS:  # they may quote values
            fault = "does not fit"
        self._rows.setdefault(fault, array("q")).append(number)

    @property
    def num_rows(self) -> int:
        """Number of rows that do not fit."""
        return sum(map(len, self._rows.values()))

    def read_rows(
        self, read: Callable[[Any], Row | None], records: Records, first: int
    ) -> list[tuple[int, Row]]:
        """Returns the rows that `read` makes of records, each with its index among them.

        Args:
            read: Converts a record into a row, or None to leave it out; raises ValueError if the
                record does not fit.
        """
        rows: list[tuple[int, Row]] = []
        for number, record in enumerate(records):
            try:
                if column := self.lost.get(first + number):
                    raise ValueError(f"has {column}, which would not reach the model")
                row = read(record)
            except ValueError as error:
                self.add(str(error), first + number)
                continue
            if row is not None:
                rows.append((number, row))
        return rows

    def close(self, num_rows: int) -> str:
        """Returns a summary of the dropped rows; empty if all rows fit."""
        numbers = sorted(number for rows in self._rows.values() for number in rows)
        if not numbers:
            return ""
        if self.drops and len(numbers) <= MAX_DROPPED * num_rows:
            return f"{len(numbers)} of {num_rows} rows dropped: {summarize_faults(self._rows)}"
        fault = next(text for text, rows in self._rows.items() if numbers[0] in rows)
        others = ", ".join(map(str, numbers[1:6]))
        more = f"; {len(numbers) - 1} more do not fit: rows {others}" if others else ""
        raise DataError(
            f"{self._where}: row {numbers[0]} {fault}{more}",
            fix=invalid_fix("correct or remove these rows", drops=self.drops),
        )


def present_columns(records: Records) -> set[str]:
    """Returns the columns that have a value in any record."""
    names: set[str] = set()
    for chunk in chunks_of(records):
        if not isinstance(chunk, list):
            filled = (n for n in chunk.column_names if chunk.column(n).null_count < len(chunk))
            names.update(filled)
            continue
        for record in chunk:
            if not names.issuperset(record):
                names.update(str(key) for key, value in record.items() if value is not None)
    return names


def chosen_columns(
    records: Records, form: RowFormat, where: str, dropped: dict[int, str] | None = None
) -> Records:
    """Removes the dropped columns and renames those that `form.columns` maps.

    A column that is mapped to an answer, a completion, an id or a task also stays under its old
    name, for rewards that read it by that name, and so does a column that a path reaches into.
    """
    names = column_names(records)
    absent = [column for column in form.drop_columns if column not in names]
    absent += [path for path in form.columns if not has_path(path, records)]
    if absent:
        closest = {path: closest_name(path, names) for path in absent}
        hints = [f"{path!r} may be {name!r}" for path, name in closest.items() if name]
        raise DataError(
            f"{where}: no row has the column {' or the column '.join(map(repr, absent))}",
            expected=f"columns of the data in columns and drop_columns: {', '.join(names)[:200]}",
            got=", ".join(absent),
            fix="; ".join(hints) or "correct data.columns or data.drop_columns",
        )
    removed = {*form.drop_columns, *form.columns}
    _refuse_unused(records, {*_UNUSED} & {*names} - removed, where, dropped)
    if not removed:
        return records
    removed -= kept_names(form)

    def select(chunk: Chunk) -> Chunk:
        if not isinstance(chunk, list) and {*form.columns} <= {*chunk.column_names}:
            columns = {n: chunk.column(n) for n in chunk.column_names if n not in removed}
            columns |= {target: chunk.column(name) for name, target in form.columns.items()}
            return type(chunk).from_arrays([*columns.values()], names=[*columns])
        return [
            {
                **{key: value for key, value in record.items() if key not in removed},
                **{target: value_at(record, path) for path, target in form.columns.items()},
            }
            for record in rows_of(chunk)
        ]

    return mapped(records, select)


def kept_names(form: RowFormat) -> set[str]:
    """Returns the mapped columns that also keep their old name, for rewards."""
    return {
        name
        for name, target in form.columns.items()
        if target in ("answer", "completion", "id", "task") and name not in KNOWN_COLUMNS
    }


def has_path(path: str, records: Records) -> bool:
    """Whether any record has a value at a path."""
    return any(
        path in chunk.column_names
        if not isinstance(chunk, list) and (path in chunk.column_names or "." not in path)
        else any(_at(record, path) is not _ABSENT for record in rows_of(chunk))
        for chunk in chunks_of(records)
    )


def _refuse_unused(
    records: Records, columns: Collection[str], where: str, dropped: dict[int, str] | None
) -> None:
    def select(chunk: Chunk) -> Chunk:
        if isinstance(chunk, list):
            return chunk
        return chunk.select([name for name in chunk.column_names if name in columns])

    refuse_lost(
        mapped(records, select),
        columns,
        where=where,
        expected="rows of text only",
        fix=lambda column: f"use other data, or train without them: data.drop_columns: [{column}]",
        dropped=dropped,
    )
