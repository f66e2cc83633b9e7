"""Prompts and answers written from columns: templates, system turns, answer patterns."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.chunks import column_names
from nemo_rl_core.data.datasets.answers import answer_finder
from nemo_rl_core.data.datasets.columns import is_anywhere, value_at
from nemo_rl_core.data.datasets.records import Records
from nemo_rl_core.data.turns import stored, turns_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([A-Za-z_][\w.]*)\}")


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
    unknown = [name for name in names if name != "prompt" and not is_anywhere(name, sources)]
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
