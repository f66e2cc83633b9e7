"""Conversion of records into rows, in chunks; reports all rows that do not fit together.

A table of text and integers, in which no text may be a conversation, is converted by columns, all
other chunks row by row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

from nemo_rl_core.data.chunks import Chunk, RowWriter, chunks_of, rows_of
from nemo_rl_core.data.columnwise import is_text, may_hold_turns
from nemo_rl_core.data.datasets import dialogues
from nemo_rl_core.data.datasets.columns import RowFaults
from nemo_rl_core.data.datasets.content import CONTENT, has_content
from nemo_rl_core.data.datasets.prompt_columns import AnswerPattern, PromptWriter
from nemo_rl_core.data.datasets.published import PublishedFormat
from nemo_rl_core.data.datasets.records import Records
from nemo_rl_core.data.datasets.row_converters import (
    RecordFormat,
    json_of,
    prompt_only_row,
    prompt_row,
    text_or,
    text_row,
)
from nemo_rl_core.data.json_values import parsed
from nemo_rl_core.data.tools import SPELLINGS, stored_tools
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(kw_only=True)
class RowReading:
    """Converts records into rows, in chunks, and finally refuses all rows that do not fit.

    Attributes:
        published: Published format that is read first, if any.
        content: Columns that are written into prompts, by kind of content.
        others: Columns that go into `metadata`.
        num_dropped: Number of dropped rows, after all rows are read.
    """

    faults: RowFaults
    task: str
    row_format: RecordFormat
    published: PublishedFormat | None
    content: Mapping[str, str]
    others: Sequence[str]
    answers: AnswerPattern | None
    prompts: PromptWriter
    num_dropped: int = 0
    dropped: str = ""

    def rows(self, plain: Records, records: Records) -> Sequence[Row]:
        """Converts all records.

        Args:
            plain: Records with their selected columns.
            records: The same records with their original columns.
        """
        writer = RowWriter()
        first = 0
        for chunk, source in zip(chunks_of(plain), chunks_of(records), strict=True):
            writer.add(self._chunk(chunk, source, first))
            first += len(chunk)
        dropped = [self.faults.close(len(plain))]
        self.num_dropped = self.faults.num_rows
        if self.answers is not None:
            dropped.append(self.answers.close(drops=self.faults.drops))
            self.num_dropped += self.answers.num_missing
        self.dropped = "; ".join(filter(None, dropped))
        self.prompts.refuse_double_system()
        return writer.close()

    def _chunk(self, chunk: Chunk, source: Chunk, first: int) -> Chunk:
        if not isinstance(chunk, list):
            table = self._table(chunk, first)
            if table is not None:
                return table
        plain = rows_of(chunk)
        numbered = self.faults.read_rows(self._row, plain, first)
        rows = [
            {
                "id": text_or(plain[number].get("id"), str(first + number)),
                **row,
                "task": text_or(plain[number].get("task"), self.task),
            }
            for number, row in numbered
        ]
        if self.answers is not None:
            rows = self.answers.extract_from_rows(rows)
        if self.answers is not None and self.faults.drops:
            has_answer = [row["answer"] is not None for row in rows]
            rows = [*compress(rows, has_answer)]
            numbered = [*compress(numbered, has_answer)]
        if not self.prompts.writes:
            return rows
        numbers = [number for number, _ in numbered]
        return self.prompts.write(rows, numbers, rows_of(source), first)

    def _table(self, chunk: "pa.Table", first: int) -> "pa.Table | None":
        has_tools = not {*SPELLINGS}.isdisjoint(chunk.column_names)
        if self.prompts.writes or self.content or self.faults.lost or has_tools:
            return None
        understood = chunk
        if self.published is not None:
            if not self.published.names or {*CONTENT} & {*self.published.names}:
                return None
            understood = _renamed(chunk, self.published.names)
        columns: dict[str, Any] | None = None
        if self.row_format.row is prompt_row:
            columns = _prompt_columns(understood)
        elif self.row_format.row is prompt_only_row:
            columns = _prompt_only_columns(understood)
        elif self.row_format.row is text_row:
            columns = _text_columns(chunk)
        table = None if columns is None else self._with_common_columns(chunk, columns, first)
        if table is None or self.answers is None:
            return table
        table = self.answers.extract_from_table(table)
        return table.filter(table.column("answer").is_valid()) if self.faults.drops else table

    def _with_common_columns(
        self, source: "pa.Table", columns: Mapping[str, Any], first: int
    ) -> "pa.Table | None":
        import pyarrow as pa
        import pyarrow.compute as pc

        numbers = pc.cast(pa.array(range(first, first + len(source))), pa.large_string())
        common = {"id": numbers, "task": _constant(self.task, len(source))}
        for name, default in common.items():
            if name in source.column_names:
                texts = _text(source, name)
                if texts is None:
                    return None
                common[name] = _or(texts, default)
        names = [name for name in ("metadata", *self.others) if name in source.column_names]
        metadata = _constant("{}", len(source))
        if names:
            try:
                rows = rows_of(source.select(names))
                texts = [_metadata(row, self.others) for row in rows]
                metadata = pa.array(texts, pa.large_string())
            # Not text, or not representable as JSON: the check of each row reports these rows.
            except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError):
                return None
        return pa.table(
            {"id": common["id"], **columns, "task": common["task"], "metadata": metadata}
        )

    def _row(self, record: Mapping[str, Any]) -> Row | None:
        readable = record if self.published is None else self.published.read(record)
        if readable is None:
            return None
        content = {kind: record.get(column) for kind, column in self.content.items()}
        if "choices" in content and not has_content(content["choices"]):
            raise ValueError("has no choices, but other rows have some")
        kinds = dict.fromkeys(CONTENT)
        # Columns that a published format writes take precedence over content.
        published = {} if self.published is None else readable
        row = self.row_format.row({**readable, **kinds, **content, **published})
        added = {"metadata": published["metadata"]} if "metadata" in published else {}
        metadata = _metadata({**record, **added}, self.others)
        if row is None:
            return None
        tools = ({**record, **readable}.get(name) for name in SPELLINGS)
        definitions = stored_tools(next(filter(has_content, tools), None))
        if definitions == "[]":
            return {**row, "metadata": metadata}
        if "text" in row:
            raise ValueError("has tools, which would not reach the model (data.drop_columns)")
        return {**row, "tools": definitions, "metadata": metadata}


def _metadata(record: Mapping[str, Any], others: Sequence[str]) -> Any:
    metadata = record.get("metadata")
    if isinstance(metadata, list):  # URLs, in stack-exchange-paired
        metadata = {"metadata": metadata}
    columns = {name: record[name] for name in others if record.get(name) is not None}
    if not columns:
        return "{}" if metadata is None else text_or(json_of(metadata), "{}")
    if metadata in (None, ""):
        return json_of(columns)
    entries = parsed(metadata, dict)
    # The schema refuses metadata that is not an object.
    return json_of({**columns, **entries}) if isinstance(entries, dict) else metadata


def _prompt_columns(table: "pa.Table") -> dict[str, Any] | None:
    """Returns the columns of prompts from `prompt`, and `answer` or `completion` or both."""
    names = [name for name in ("prompt", "answer", "completion") if name in table.column_names]
    texts = {name: _text(table, name) for name in names}
    if "prompt" not in texts or len(texts) < 2 or any(text is None for text in texts.values()):
        return None
    if any(_may_hold_turns(texts[name]) for name in names if name != "answer"):
        return None
    answer = texts.get("answer", texts.get("completion"))
    completion = texts.get("completion", answer)
    filled = {"answer": _or(answer, completion), "completion": _or(completion, answer)}
    return {"prompt": texts["prompt"], **filled}


def _prompt_only_columns(table: "pa.Table") -> dict[str, Any] | None:
    prompt = _text(table, "prompt")
    if prompt is None or _may_hold_turns(prompt):
        return None
    empty = _constant("", len(table))
    return {"prompt": prompt, "answer": empty, "completion": empty}


def _text_columns(table: "pa.Table") -> dict[str, Any] | None:
    names = table.column_names
    if "text" not in names or "max_tokens" in names or not is_text(table.column("text").type):
        return None
    return {"text": _text(table, "text")}


def _renamed(table: "pa.Table", names: Mapping[str, str]) -> "pa.Table":
    """Selects and renames columns by new name; absent ones are ignored."""
    present = {target: source for target, source in names.items() if source in table.column_names}
    return table.select([*present.values()]).rename_columns([*present])


def _text(table: "pa.Table", name: str) -> Any:
    """Returns a column of text or integers as text; None if it is absent or of another type."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if name not in table.column_names:
        return None
    column = table.column(name)
    kind = column.type
    if is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind):
        return pc.cast(column, pa.large_string())
    return None


def _may_hold_turns(column: Any) -> bool:
    import pyarrow.compute as pc

    starts = (pc.any(pc.starts_with(column, start)).as_py() for start in dialogues.BEGINNINGS)
    return any(starts) or may_hold_turns(column)


def _or(column: Any, default: Any) -> Any:
    """Fills null and empty texts of a column from another column."""
    import pyarrow.compute as pc

    if column is default:
        return column
    if not column.null_count and not pc.any(pc.equal(column, "")).as_py():
        return column
    is_empty = pc.fill_null(pc.equal(column, ""), True)
    return pc.if_else(is_empty, default, column)


def _constant(value: str, count: int) -> Any:
    import pyarrow as pa

    return pa.repeat(pa.scalar(value, pa.large_string()), count)
