"""What a row format changes of records: columns, answers, prompts and system turns."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.names import closest_name
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.chunks import chunks_of, column_names, rows_of
from nemo_rl_core.data.datasets.answers import answer_finder
from nemo_rl_core.data.datasets.records import MappedRecords, Records
from nemo_rl_core.data.turns import stored, turns_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

_UNUSED = ("image", "images", "video", "videos", "audio", "audios", "tools")
"""Columns that change what a row asks, and that no stage reads yet."""

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([A-Za-z_][\w.]*)\}")
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
    absent += [path for path in form.columns if not _is_anywhere(path, records)]
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


def _is_anywhere(path: str, records: Records) -> bool:
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


class AnswerPattern:
    """Takes answers out of longer texts; completions stay whole.

    Args:
        pattern: As `RowFormat.answer_pattern`.
        where: Name of the source in messages.
    """

    def __init__(self, pattern: str, where: str) -> None:
        self._pattern, self._where = pattern, where
        self._find = answer_finder(pattern)
        self._num_rows = 0
        self._num_missing = 0
        self._first = (0, "")

    def taken(self, rows: Sequence[Row]) -> list[Row]:
        """Rows with the answers that their texts hold."""
        found = self._answers([row["answer"] for row in rows])
        return [{**row, "answer": answer} for row, answer in zip(rows, found, strict=True)]

    def taken_of_table(self, table: "pa.Table") -> "pa.Table":
        """The same of a table."""
        import pyarrow as pa

        found = self._answers(table.column("answer").to_pylist())
        place = table.column_names.index("answer")
        return table.set_column(place, "answer", pa.array(found, pa.large_string()))

    def _answers(self, texts: Sequence[Any]) -> list[str | None]:
        found = [self._find(text) if isinstance(text, str) else None for text in texts]
        missing = found.count(None)
        if missing and not self._num_missing:
            number = found.index(None)
            self._first = (self._num_rows + number, str(texts[number]))
        self._num_missing += missing
        self._num_rows += len(texts)
        return found

    def refuse(self) -> None:
        """Raises if rows lack an answer.

        Raises:
            DataError: Names the first row without an answer of that pattern.
        """
        if not self._num_missing:
            return
        number, text = self._first
        raise DataError(
            f"{self._where}: {self._num_missing} of {self._num_rows} rows have no answer of the "
            f"pattern {self._pattern!r}",
            expected="an answer in every row",
            got=f"row {number} (counted from 0), which ends with {text[-60:]!r}",
            fix="correct data.answer_pattern or data.columns, or mend or remove these rows",
        )


class PromptWriter:
    """Writes prompts by a template, and a system turn before them.

    Args:
        form: The template and the system prompt; without both, rows stay as they are.
        records: With the columns that the data has.
        hidden: Columns that hold answers, which a prompt must not show.
        where: Name of the source in messages.
    """

    def __init__(
        self, form: RowFormat, records: Records, hidden: Collection[str], where: str
    ) -> None:
        self._form, self._records, self._hidden, self._where = form, records, hidden, where
        self._fill: Callable[[Mapping[str, Any], str], str] | None = None
        self._num_twice, self._first_twice = 0, 0

    @property
    def writes(self) -> bool:
        """Whether rows change at all."""
        return self._form.prompt_template is not None or self._form.system_prompt is not None

    def written(
        self, rows: list[Row], numbers: Sequence[int], records: Records, first: int
    ) -> list[Row]:
        """Rows with their prompts written.

        Args:
            rows: In the form of their kind.
            numbers: The place of each row's record among `records`.
            records: Of a chunk, with the columns that the data has.
            first: The number of the first of them.

        Raises:
            DataError: If the rows have no prompt for the template, or a placeholder names no column
                or one that holds answers.
        """
        template, system = self._form.prompt_template, self._form.system_prompt
        if template is not None and rows:
            self._fill = self._fill or self._filler(template, rows[0])
            rows = [
                {**row, "prompt": _asked(row["prompt"], partial(self._fill, records[number]))}
                for row, number in zip(rows, numbers, strict=True)
            ]
        if system is not None and rows:
            rows = self._with_system(rows, [first + number for number in numbers], system)
        return rows

    def refuse(self) -> None:
        """Raises if a row has a system turn beside `system_prompt`.

        Raises:
            DataError: Names the first such row.
        """
        if not self._num_twice:
            return
        raise DataError(
            f"{self._where}: {self._num_twice} rows have a system turn of their own beside "
            "data.system_prompt",
            expected="one system turn a row",
            got=f"row {self._first_twice} (counted from 0)",
            fix="leave system_prompt out, or take these turns out of the rows",
        )

    def _filler(self, template: str, row: Row) -> Callable[[Mapping[str, Any], str], str]:
        if "prompt" not in row:
            raise DataError(
                f"{self._where}: data.prompt_template writes prompts, and these rows have none",
                expected="prompts with answers, or preference pairs",
                got=f"rows with {', '.join(row)}",
                fix="leave prompt_template out, or map columns to prompt and completion",
            )
        return _template(template, self._records, self._hidden, self._where)

    def _with_system(self, rows: list[Row], numbers: Sequence[int], system: str) -> list[Row]:
        column = next((name for name in ("messages", "prompt") if name in rows[0]), None)
        if column is None:
            raise DataError(
                f"{self._where}: data.system_prompt needs conversations or prompts",
                got=f"rows with {', '.join(rows[0])}",
                fix="leave system_prompt out",
            )
        first = {"role": "system", "content": system}
        found = []
        for number, row in zip(numbers, rows, strict=True):
            turns = turns_of(row[column])
            if turns is None and isinstance(row[column], str):
                turns = [{"role": "user", "content": row[column]}]
            if turns and turns[0].get("role") == "system":
                self._first_twice = self._first_twice if self._num_twice else number
                self._num_twice += 1
            found.append({**row, column: stored([first, *turns])} if turns else row)
        return found


def _asked(prompt: Any, write: Callable[[str], str]) -> Any:
    """The prompt with the text of its last turn written anew."""
    turns = turns_of(prompt)
    if turns is None:
        return write(prompt) if isinstance(prompt, str) else prompt
    content = turns[-1].get("content")
    if not isinstance(content, str):
        return prompt
    return stored([*turns[:-1], {**turns[-1], "content": write(content)}])


def _template(
    template: str, sources: Records, hidden: Collection[str], where: str
) -> Callable[[Mapping[str, Any], str], str]:
    names = [match.group(2) for match in _PLACEHOLDER.finditer(template) if match.group(2)]
    columns = {*column_names(sources), "prompt"}
    unknown = [name for name in names if name != "prompt" and not _is_anywhere(name, sources)]
    shown = [name for name in names if name.partition(".")[0] in hidden or name in hidden]
    if unknown or shown or not names:
        problem = (
            f"names no column: {', '.join(unknown)}"
            if unknown
            else f"shows the answer: {', '.join(shown)}"
            if shown
            else "names no column, so all prompts would be the same"
        )
        raise DataError(
            f"{where}: data.prompt_template {problem}",
            expected=f"one or more of {', '.join(f'{{{n}}}' for n in sorted(columns - {*hidden}))}",
            got=template[:160],
            fix="write two braces on each side for text in braces, as in \\boxed{{answer}}",
        )

    def fill(source: Mapping[str, Any], prompt: str) -> str:
        def one(match: re.Match[str]) -> str:
            if match.group(1):
                return f"{{{match.group(1)}}}"
            name = match.group(2)
            value = prompt if name == "prompt" else value_at(source, name)
            return "" if value is None else str(value)

        return _PLACEHOLDER.sub(one, template)

    return fill
