"""What a row format changes of records: columns, answers, prompts and system turns."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from nemo_rl_core.config.names import closest_name
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.datasets.answers import answer_finder
from nemo_rl_core.data.turns import stored, turns_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

Records = Sequence[Mapping[str, Any]]

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


def chosen_columns(records: Records, form: RowFormat, where: str) -> Records:
    """Records without the dropped columns, and with those that `form.columns` maps.

    A mapped column loses its own name; one that a path reaches into stays.

    Raises:
        DataError: If no row has a named column, or rows have images or tools, which nothing reads.
    """
    names: dict[str, None] = {}
    for record in records:
        if not names.keys() >= record.keys():
            names |= dict.fromkeys(map(str, record))
    absent = [each for each in form.drop_columns if each not in names]
    absent += [path for path in form.columns if all(_at(r, path) is _ABSENT for r in records)]
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
    return [
        {
            **{key: value for key, value in record.items() if key not in gone},
            **{target: value_at(record, path) for path, target in form.columns.items()},
        }
        for record in records
    ]


def _refuse_unused(records: Records, columns: Collection[str], where: str) -> None:
    for column in sorted(columns):
        rows = [n for n, record in enumerate(records) if _has_content(record.get(column))]
        if rows:
            raise DataError(
                f"{where}: {len(rows)} rows have {column}, which would not reach the model",
                expected="rows of text alone",
                got=f"the column {column}, first in row {rows[0]} (counted from 0)",
                fix=f"use other data, or train without them: data.drop_columns: [{column}]",
            )


def _has_content(value: Any) -> bool:
    if value is None or isinstance(value, str | bytes | list | dict | tuple):
        return bool(value) and value not in ("[]", "{}", "null")
    return True


def with_answers(rows: Sequence[Row], pattern: str, where: str) -> list[Row]:
    """Rows whose answers are taken out of longer texts; completions stay whole.

    Raises:
        DataError: Names the rows without an answer of that pattern.
    """
    find = answer_finder(pattern)
    found = [find(row["answer"]) if isinstance(row["answer"], str) else None for row in rows]
    missing = [number for number, answer in enumerate(found) if answer is None]
    if missing:
        text = str(rows[missing[0]]["answer"])
        raise DataError(
            f"{where}: {len(missing)} of {len(rows)} rows have no answer of the pattern "
            f"{pattern!r}",
            expected="an answer in every row",
            got=f"row {missing[0]} (counted from 0), which ends with {text[-60:]!r}",
            fix="correct data.answer_pattern or data.columns, or mend or remove these rows",
        )
    return [{**row, "answer": answer} for row, answer in zip(rows, found, strict=True)]


def with_prompts(
    numbered: Sequence[tuple[int, Row]],
    records: Records,
    form: RowFormat,
    hidden: Collection[str],
    where: str,
) -> list[Row]:
    """Rows whose prompts are written by the template and begin with the system turn.

    Args:
        numbered: Rows in the form of their kind, each with the number of its record.
        records: With the columns that the data has.
        form: The template and the system prompt; without both the rows are returned.
        hidden: Columns that hold answers, which a prompt must not show.
        where: Name of the source in messages.

    Raises:
        DataError: If the rows have no prompt for the template, if a placeholder names no column or
            one that holds answers, or if a row has a system turn beside `system_prompt`.
    """
    found = [row for _, row in numbered]
    if form.prompt_template is not None and found:
        if "prompt" not in found[0]:
            raise DataError(
                f"{where}: data.prompt_template writes prompts, and these rows have none",
                expected="prompts with answers, or preference pairs",
                got=f"rows with {', '.join(found[0])}",
                fix="leave prompt_template out, or map columns to prompt and completion",
            )
        fill = _template(form.prompt_template, records, hidden, where)
        found = [
            {**row, "prompt": _asked(row["prompt"], partial(fill, records[number]))}
            for number, row in numbered
        ]
    if form.system_prompt is not None and found:
        numbers = [number for number, _ in numbered]
        found = _with_system(dict(zip(numbers, found, strict=True)), form.system_prompt, where)
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
    columns = {str(key) for record in sources for key in record} | {"prompt"}
    unknown = [
        name
        for name in names
        if name != "prompt" and all(_at(record, name) is _ABSENT for record in sources)
    ]
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


def _with_system(rows: Mapping[int, Row], system: str, where: str) -> list[Row]:
    first_row = next(iter(rows.values()))
    column = next((name for name in ("messages", "prompt") if name in first_row), None)
    if column is None:
        raise DataError(
            f"{where}: data.system_prompt needs conversations or prompts",
            got=f"rows with {', '.join(first_row)}",
            fix="leave system_prompt out",
        )
    first = {"role": "system", "content": system}
    found, twice = [], []
    for number, row in rows.items():
        turns = turns_of(row[column])
        if turns is None and isinstance(row[column], str):
            turns = [{"role": "user", "content": row[column]}]
        if turns and turns[0].get("role") == "system":
            twice.append(number)
        found.append({**row, column: stored([first, *turns])} if turns else row)
    if twice:
        raise DataError(
            f"{where}: {len(twice)} rows have a system turn of their own beside data.system_prompt",
            expected="one system turn a row",
            got=f"row {twice[0]} (counted from 0)",
            fix="leave system_prompt out, or take these turns out of the rows",
        )
    return found
