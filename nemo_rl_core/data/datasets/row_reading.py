"""Rows of records, chunk by chunk; all that do not fit are refused at once."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl_core.data.chunks import RowWriter, chunks_of, rows_of
from nemo_rl_core.data.datasets import columnar
from nemo_rl_core.data.datasets.columns import RowFaults
from nemo_rl_core.data.datasets.known import PublishedFormat
from nemo_rl_core.data.datasets.prompt_columns import AnswerPattern, PromptWriter
from nemo_rl_core.data.datasets.records import Records
from nemo_rl_core.data.datasets.row_converters import (
    RecordFormat,
    json_of,
    lone_prompt_row,
    prompt_row,
    text_or,
    text_row,
)
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa


class RowReading:
    """Makes rows of records, chunk by chunk, and refuses all that do not fit at the end.

    Args:
        where: Name of the source in messages.
        task: The task of rows without one.
        found: The format of what is understood.
        published: The published format that is read first, if any.
        others: Columns that go into `metadata`.
        answers: Takes answers out of texts, if asked.
        prompts: Writes prompts and system turns, if asked.
    """

    def __init__(
        self,
        *,
        where: str,
        task: str,
        found: RecordFormat,
        published: PublishedFormat | None,
        others: Sequence[str],
        answers: AnswerPattern | None,
        prompts: PromptWriter,
    ) -> None:
        self._task, self._found, self._published = task, found, published
        self._others, self._answers, self._prompts = others, answers, prompts
        self._faults = RowFaults(where)

    def rows(self, plain: Records, records: Records) -> Sequence[Row]:
        """The rows of all records.

        Args:
            plain: The records with their columns chosen.
            records: With the columns that the data has.

        Raises:
            DataError: Names rows that do not fit.
        """
        writer = RowWriter()
        first = 0
        for chunk, source in zip(chunks_of(plain), chunks_of(records), strict=True):
            writer.add(self._chunk(chunk, source, first))
            first += len(chunk)
        self._faults.refuse()
        if self._answers is not None:
            self._answers.refuse()
        self._prompts.refuse()
        return writer.close()

    def _chunk(
        self, chunk: "list[Row] | pa.Table", source: "list[Row] | pa.Table", first: int
    ) -> "list[Row] | pa.Table":
        if not isinstance(chunk, list):
            table = self._table(chunk, first)
            if table is not None:
                return table
        plain = rows_of(chunk)
        numbered = self._faults.each(self._row, plain, first)
        rows = [
            {
                "id": text_or(plain[number].get("id"), str(first + number)),
                **row,
                "task": text_or(plain[number].get("task"), self._task),
                "metadata": _metadata(plain[number], self._others),
            }
            for number, row in numbered
        ]
        if self._answers is not None:
            rows = self._answers.taken(rows)
        if not self._prompts.writes:
            return rows
        numbers = [number for number, _ in numbered]
        return self._prompts.written(rows, numbers, rows_of(source), first)

    def _table(self, chunk: "pa.Table", first: int) -> "pa.Table | None":
        """The rows as columns, where nothing has to be done value by value."""
        if self._prompts.writes:
            return None
        understood = chunk
        if self._published is not None:
            if not self._published.names:
                return None
            understood = columnar.renamed(chunk, self._published.names)
        found: pa.Table | None = None
        metadata = columnar.RowMetadata(self._others, lambda row: _metadata(row, self._others))
        common: Any = {"first": first, "task": self._task, "metadata": metadata}
        if self._found.row is prompt_row:
            found = columnar.prompt_table(understood, chunk, **common)
        elif self._found.row is lone_prompt_row:
            found = columnar.lone_prompt_table(understood, chunk, **common)
        elif self._found.row is text_row:
            found = columnar.text_table(chunk, **common)
        if found is None or self._answers is None:
            return found
        return self._answers.taken_of_table(found)

    def _row(self, record: Mapping[str, Any]) -> Row | None:
        readable = record if self._published is None else self._published.read(record)
        return None if readable is None else self._found.row(readable)


def _metadata(record: Mapping[str, Any], others: Sequence[str]) -> Any:
    own = record.get("metadata")
    carried = {name: record[name] for name in others if record.get(name) is not None}
    if not carried:
        return "{}" if own is None else text_or(json_of(own), "{}")
    if own in (None, ""):
        return json_of(carried)
    try:
        parsed = json.loads(own) if isinstance(own, str) else own
    except ValueError:
        parsed = None
    # What is no object is named by the schema.
    return json_of({**carried, **parsed}) if isinstance(parsed, dict) else own
