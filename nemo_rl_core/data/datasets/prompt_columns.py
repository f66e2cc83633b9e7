"""Prompts and answers made from columns: templates, system turns, answer patterns."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.config.row_policy import MAX_DROPPED
from nemo_rl_core.data.chunks import column_names
from nemo_rl_core.data.datasets.columns import has_path, value_at
from nemo_rl_core.data.datasets.records import Records
from nemo_rl_core.data.frames import invalid_fix
from nemo_rl_core.data.turns import stored, turns_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.functional.boxes import last_boxes
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([A-Za-z_][\w.]*)\}")
_THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?")

FindAnswer = Callable[[str], str | None]
"""Returns the answer in a text, or None if there is none."""


def answer_finder(pattern: str) -> FindAnswer:
    """Returns the function for `RowFormat.answer_pattern`: `hashes`, `boxed` or an expression."""
    named: dict[str, FindAnswer] = {"hashes": _after_hashes, "boxed": last_boxes}
    if pattern in named:
        return named[pattern]
    expression = re.compile(pattern)

    def last_match(text: str) -> str | None:
        answers = [match.group(1) for match in expression.finditer(text)]
        answers = [answer for answer in answers if answer is not None]
        return answers[-1].strip() or None if answers else None

    return last_match


def _after_hashes(text: str) -> str | None:
    """Returns the rest of the line after the last `####`; a number loses its thousands commas.

    Example:
        >>> _after_hashes("48/2 = 24, 48+24 = 72\\n#### 1,072")
        '1072'
        >>> _after_hashes("72") is None
        True
    """
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    if not mark or not lines:
        return None
    answer = lines[0].strip()
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


class AnswerPattern:
    """Extracts answers from longer texts; completions stay complete.

    Attributes:
        num_missing: Number of rows without an answer so far.
    """

    def __init__(self, pattern: str, where: str) -> None:
        self._pattern, self._where = pattern, where
        self._find = answer_finder(pattern)
        self._num_rows = 0
        self.num_missing = 0
        self._first = (0, "")

    def extract_from_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Replaces the answer of each row by the part that matches the pattern."""
        answers = self._answers([row["answer"] for row in rows])
        return [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]

    def extract_from_table(self, table: "pa.Table") -> "pa.Table":
        """Same as `extract_from_rows`, for a table."""
        import pyarrow as pa

        answers = self._answers(table.column("answer").to_pylist())
        index = table.column_names.index("answer")
        return table.set_column(index, "answer", pa.array(answers, pa.large_string()))

    def _answers(self, texts: Sequence[Any]) -> list[str | None]:
        answers = [self._find(text) if isinstance(text, str) else None for text in texts]
        missing = answers.count(None)
        if missing and not self.num_missing:
            number = answers.index(None)
            self._first = (self._num_rows + number, str(texts[number]))
        self.num_missing += missing
        self._num_rows += len(texts)
        return answers

    def close(self, *, drops: bool) -> str:
        """Returns a summary of the rows dropped for a missing answer; empty if there are none."""
        if not self.num_missing:
            return ""
        if drops and self.num_missing <= MAX_DROPPED * self._num_rows:
            return (
                f"{self.num_missing} of {self._num_rows} rows dropped: no answer of the pattern "
                f"{self._pattern!r}"
            )
        number, text = self._first
        raise DataError(
            f"{self._where}: {self.num_missing} of {self._num_rows} rows have no answer of the "
            f"pattern {self._pattern!r}",
            expected="an answer in every row",
            got=f"row {number} (counted from 0), which ends with {text[-60:]!r}",
            fix=invalid_fix(
                "correct data.answer_pattern or data.columns, or correct or remove these rows",
                drops=drops,
            ),
        )


class PromptWriter:
    """Writes prompts from a template and adds a system turn.

    Args:
        records: All records with their original columns.
        hidden: Columns with answers, which a prompt must not show.
    """

    def __init__(
        self, form: RowFormat, records: Records, hidden: Collection[str], where: str
    ) -> None:
        self._form, self._records, self._hidden, self._where = form, records, hidden, where
        self._fill: Callable[[Mapping[str, Any], str], str] | None = None
        self._num_twice, self._first_twice = 0, 0

    @property
    def writes(self) -> bool:
        """Whether there is a template or a system prompt."""
        return self._form.prompt_template is not None or self._form.system_prompt is not None

    def write(
        self, rows: list[Row], numbers: Sequence[int], records: Records, first: int
    ) -> list[Row]:
        """Returns rows with new prompts.

        Args:
            numbers: Index of each row's record in `records`.
            records: Records of a chunk with their original columns.
            first: Index of the first of these records among all.
        """
        template, system = self._form.prompt_template, self._form.system_prompt
        if template is not None and rows:
            self._fill = self._fill or self._filler(template, rows[0])
            rows = [
                {**row, "prompt": _rewritten(row["prompt"], partial(self._fill, records[number]))}
                for row, number in zip(rows, numbers, strict=True)
            ]
        if system is not None and rows:
            rows = self._with_system(rows, [first + number for number in numbers], system)
        return rows

    def refuse_double_system(self) -> None:
        """Raises a `DataError` if a row has a system turn in addition to `system_prompt`."""
        if not self._num_twice:
            return
        raise DataError(
            f"{self._where}: {self._num_twice} rows already have a system turn, and "
            "data.system_prompt adds another",
            expected="one system turn per row",
            got=f"row {self._first_twice} (counted from 0)",
            fix="remove system_prompt, remove these turns from the rows, or drop the column that "
            "they come from: data.drop_columns: [system]",
        )

    def _filler(self, template: str, row: Row) -> Callable[[Mapping[str, Any], str], str]:
        if "prompt" not in row:
            raise DataError(
                f"{self._where}: data.prompt_template needs rows with prompts",
                expected="prompts with answers, or preference pairs",
                got=f"rows with {', '.join(row)}",
                fix="remove prompt_template, or map columns to prompt and completion",
            )
        names = [match.group(2) for match in _PLACEHOLDER.finditer(template) if match.group(2)]
        usable = sorted({*column_names(self._records), "prompt"} - {*self._hidden})
        unknown = [name for name in names if name != "prompt" and not has_path(name, self._records)]
        shown = [
            name for name in names if name.partition(".")[0] in self._hidden or name in self._hidden
        ]
        if unknown or shown or not names:
            problem = (
                f"names no column: {', '.join(unknown)}"
                if unknown
                else f"shows the answer: {', '.join(shown)}"
                if shown
                else "names no column, so that all prompts would be the same"
            )
            raise DataError(
                f"{self._where}: data.prompt_template {problem}",
                expected=f"one or more of {', '.join(f'{{{name}}}' for name in usable)}",
                got=template[:160],
                fix="write two braces on each side for text in braces, as in \\boxed{{answer}}",
            )

        def fill(source: Mapping[str, Any], prompt: str) -> str:
            def substitute(match: re.Match[str]) -> str:
                if match.group(1):
                    return f"{{{match.group(1)}}}"
                name = match.group(2)
                value = prompt if name == "prompt" else value_at(source, name)
                return "" if value is None else str(value)

            return _PLACEHOLDER.sub(substitute, template)

        return fill

    def _with_system(self, rows: list[Row], numbers: Sequence[int], system: str) -> list[Row]:
        column = next((name for name in ("messages", "prompt") if name in rows[0]), None)
        if column is None:
            raise DataError(
                f"{self._where}: data.system_prompt needs conversations or prompts",
                got=f"rows with {', '.join(rows[0])}",
                fix="remove system_prompt",
            )
        first = {"role": "system", "content": system}
        with_system = []
        for number, row in zip(numbers, rows, strict=True):
            turns = turns_of(row[column])
            if turns is None and isinstance(row[column], str):
                turns = [{"role": "user", "content": row[column]}]
            if turns and turns[0].get("role") == "system":
                self._first_twice = self._first_twice if self._num_twice else number
                self._num_twice += 1
            with_system.append({**row, column: stored([first, *turns])} if turns else row)
        return with_system


def _rewritten(prompt: Any, write: Callable[[str], str]) -> Any:
    turns = turns_of(prompt)
    if turns is None:
        return write(prompt) if isinstance(prompt, str) else prompt
    content = turns[-1].get("content")
    if not isinstance(content, str):
        return prompt
    return stored([*turns[:-1], {**turns[-1], "content": write(content)}])
