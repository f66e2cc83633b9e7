"""One pass over rows that finds all their faults, a chunk at a time.

A chunk of columns of text is first proved valid by its columns. Where that fails, and for chunks of
rows, the pandera schema and the checks of contents look at every row and name the faults.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data import checks, chunks, columnwise
from nemo_rl_core.data.chunks import ChunkedRows, chunks_of, column_names, rows_of
from nemo_rl_core.data.digests import repeats
from nemo_rl_core.data.frame_faults import check_frame, describe_faults, schema_faults
from nemo_rl_core.data.frames import (
    ConversationSchema,
    Faults,
    PreferenceSchema,
    RowKind,
    RowSchema,
    Schema,
    SftSchema,
    TextSchema,
    records_of,
    row_kind,
    schema_of,
)
from nemo_rl_core.data.table_schemas import table_of
from nemo_rl_core.data.tables import CheckedRows, TableRows, TableWriter
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

COLUMNS = ("id", "prompt", "answer", "completion", "task", "metadata")
"""The columns of prompts, in the order in which they are stored."""

_COLUMNS: dict[RowKind, tuple[str, ...]] = {
    "prompts": COLUMNS,
    "conversations": ("id", "messages", "mask", "task", "metadata"),
    "text": ("id", "text", "task", "metadata"),
    "preferences": ("id", "prompt", "chosen", "rejected", "task", "metadata"),
}
_OPTIONAL = ("margin", "max_tokens")

_SCHEMAS: dict[RowKind, Schema] = {
    "prompts": SftSchema,
    "conversations": ConversationSchema,
    "text": TextSchema,
    "preferences": PreferenceSchema,
}
_ALL_OR_NONE = ("answer", "completion")
"""Columns of prompts that are empty in all rows, or in none."""


class RowChecking:
    """Checks rows of one kind.

    Args:
        rows: Of a list, or chunk by chunk.
        tokenizer: For lengths and masks; None skips those checks.
        max_prompt_tokens: The longest prompt to sample from; None for any.
        policy: The longest row, and which turns are trained on.
        limit_name: What sets the longest row, for messages.

    Attributes:
        columns: Of all rows.
        surrogates: Rows whose text cannot be encoded; nothing else is known of data with such.
        has_readable_rows: Whether all rows have the columns of their kind, with text in them.
        faults: Rows that no policy allows.
        unknown_characters: Of prompts, those without a token, in their order.
        too_long: Prompts beyond `max_prompt_tokens`.
        longer: Rows beyond `policy.max_sequence_tokens`.
        longest_prompt: Tokens of the longest prompt; infinity where it was too long to be counted.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Any | None,
        *,
        max_prompt_tokens: int | None,
        policy: RowPolicy,
        limit_name: str = "max_sequence_tokens",
    ) -> None:
        self._limit_name = limit_name
        self._rows, self._tokenizer, self._policy = rows, tokenizer, policy
        self._max_prompt_tokens = max_prompt_tokens
        self.columns = column_names(rows)
        self._kind = row_kind(self.columns)
        if self._kind == "conversations" and "mask" not in self.columns:
            self.columns.append("mask")
        wanted = (*_COLUMNS[self._kind], *_OPTIONAL)
        self._wanted = [name for name in wanted if name in self.columns]
        self._has_parts = isinstance(rows, ChunkedRows) or len(rows) > chunks.MAX_ROWS
        self._texts = _columns_with_text(rows) if self._has_parts else set()
        self._empty: dict[str, list[range]] = {name: [] for name in _ALL_OR_NONE}
        self._given: set[str] = set()
        self._unknown, self._meaning, self._untrained = Faults(), Faults(), Faults()
        self._inseparable: DataError | None = None
        self.has_readable_rows = False
        self.surrogates, self.faults = Faults(), Faults()
        self.unknown_characters: dict[str, None] = {}
        self.too_long, self.longer = Faults(), Faults()
        self.longest_prompt = 0.0

    def checked(self) -> CheckedRows | None:
        """Goes through all rows.

        Returns:
            The rows with the columns of their kind; None if they have faults.

        Raises:
            DataError: When the turns of a row cannot be separated by the chat template (names the
                row), and no row has a fault that comes before.
        """
        writer = TableWriter()
        frame: pd.DataFrame | None = None
        first = 0
        for chunk in chunks_of(self._rows):
            found = self._chunk(chunk, first)
            if isinstance(found, pd.DataFrame) and len(chunk) == len(self._rows):
                frame = found
            elif found is not None:
                writer.add(table_of(found) if isinstance(found, pd.DataFrame) else found)
            first += len(chunk)
        self._whole_columns()
        self.faults = _in_order(self.faults, self._wanted) | self._unknown
        self.has_readable_rows = not self.surrogates and not self.faults
        if self.surrogates:
            return None
        if not self.faults:
            self.faults = self._meaning
        if not self.faults and self._inseparable is not None:
            raise self._inseparable
        if not self.faults:
            self.faults = self._untrained
        else:
            self.longer = Faults()
        if self.faults:
            return None
        return CheckedRows(frame) if frame is not None else writer.close()

    def _chunk(self, chunk: "list[Row] | pa.Table", first: int) -> "pd.DataFrame | pa.Table | None":
        """Checks some rows, and returns them with the columns of their kind if they can be."""
        is_proved = (
            not isinstance(chunk, list)
            and {*self._wanted} <= {*chunk.column_names}
            and columnwise.is_valid(chunk.select(self._wanted), self._kind)
        )
        found: Any
        if is_proved and not isinstance(chunk, list):
            found = columnwise.as_large_text(chunk.select(self._wanted))
            self._note_empty(found, first)
            rows: Sequence[Row] | None = None
        else:
            rows = rows_of(chunk)
            if surrogates := checks.surrogate_faults(rows):
                _merge(self.surrogates, surrogates, first)
            if self.surrogates:
                return None
            found = self._frame(rows)
            self._note_empty(found, first)
            _merge(self.faults, schema_faults(_SCHEMAS[self._kind], found), first)
        if self._tokenizer is not None and self._kind == "prompts":
            rows = rows_of(chunk) if rows is None else rows
            unknown, too_long, characters, longest = checks.prompt_faults(
                rows, self._tokenizer, max_prompt_tokens=self._max_prompt_tokens
            )
            _merge(self._unknown, unknown, first)
            self.unknown_characters |= characters
            self.longest_prompt = max(self.longest_prompt, longest)
            _merge(self.too_long, too_long, first)
        if self.faults or self._unknown:
            return None
        # Rows that pass the schema have every column that these checks read.
        if rows is not None and not is_proved:
            _merge(self._meaning, checks.meaning_faults(rows), first)
        if not self._meaning and self._tokenizer is not None and self._is_tokenised:
            self._check_examples(found, first)
        return found

    @property
    def _is_tokenised(self) -> bool:
        # Prompts for sampling alone have no completion whose length counts.
        return self._kind != "prompts" or self._policy.max_sequence_tokens is not None

    def _check_examples(self, found: Any, first: int) -> None:
        if self._inseparable is not None:
            return
        rows = records_of(found) if isinstance(found, pd.DataFrame) else rows_of(found)
        try:
            untrained, longer = checks.example_faults(
                rows, self._tokenizer, self._policy, first=first, limit_name=self._limit_name
            )
        except DataError as error:
            self._inseparable = error
            return
        _merge(self._untrained, untrained, first)
        _merge(self.longer, longer, first)

    def _frame(self, rows: Sequence[Row]) -> pd.DataFrame:
        # A column of only numbers or only nulls keeps its type, so that the schema can refuse it.
        frame = pd.DataFrame(list(rows))
        if self._kind == "conversations" and "mask" not in frame and "mask" not in self._texts:
            frame["mask"] = self._policy.mask
        frame = frame.reindex(columns=self._wanted)
        for name in self._texts.intersection(self._wanted):
            if frame[name].isna().all():  # text in other chunks
                frame[name] = frame[name].astype("str")
        return frame

    def _note_empty(self, found: Any, first: int) -> None:
        for name in _ALL_OR_NONE if self._kind == "prompts" else ():
            if name not in self._wanted:
                continue
            if columnwise.has_value(found, name):
                self._given.add(name)
            else:
                self._empty[name].append(range(first, first + len(found)))

    def _whole_columns(self) -> None:
        """Checks of whole columns, where rows come in several chunks."""
        if self.surrogates or not self._has_parts:
            return
        for name in self._given:
            for rows in self._empty[name]:
                _merge(self.faults, {f"{name} is empty": list(rows)}, 0)
        if "id" in self.columns and (twice := repeats(self._rows, _ids_of)):
            self.faults["id occurs twice"] = twice


def check_stored(frame: pd.DataFrame, *, name: str) -> None:
    """Raises if a table does not match the schema of its columns, as `frames.check_frame`.

    Many rows are checked a part at a time, since checks copy what they look at.

    Args:
        frame: Not changed.
        name: Name of the table in messages.

    Raises:
        DataError: Names the rows (counted from 0) and the checks that they fail.
    """
    columns = [str(column) for column in frame.columns]
    schema = schema_of(columns)
    if len(frame) <= chunks.MAX_ROWS or not issubclass(schema, RowSchema):
        check_frame(schema, frame, name=name)
        return
    kind = row_kind(columns)
    rows = TableRows(table_of(frame))
    faults = Faults()
    given: set[str] = set()
    empty: Faults = {}
    first = 0
    for table in rows.chunks():
        if not columnwise.is_valid(table, kind):
            part = frame.iloc[first : first + len(table)].reset_index(drop=True)
            _merge(faults, schema_faults(schema, part), first)
        for column in {*_ALL_OR_NONE} & {*columns} if kind == "prompts" else ():
            if columnwise.has_value(table, column):
                given.add(column)
            else:
                empty.setdefault(column, []).extend(range(first, first + len(table)))
        first += len(table)
    faults |= {f"{column} is empty": empty[column] for column in given if column in empty}
    if twice := repeats(rows, _ids_of):
        faults["id occurs twice"] = twice
    if faults:
        raise describe_faults(_in_order(faults, columns), name)


def _ids_of(chunk: "list[Row] | pa.Table") -> Sequence[str]:
    if isinstance(chunk, list):
        return [str(row.get("id")) for row in chunk]
    texts: list[str] = chunk.column("id").fill_null("None").to_pylist()
    return texts


def _columns_with_text(rows: Sequence[Row]) -> set[str]:
    found: set[str] = set()
    for chunk in chunks_of(rows):
        if not isinstance(chunk, list):
            found |= columnwise.columns_with_text(chunk)
            continue
        left = [name for name in column_names(chunk) if name not in found]
        found.update(name for name in left if any(isinstance(row.get(name), str) for row in chunk))
    return found


def _in_order(faults: Faults, columns: Sequence[str]) -> Faults:
    """Faults by column, as one chunk has them: what is missing, of another type, or else wrong."""

    def place(fault_text: str) -> tuple[int, int]:
        column, _, wrong = fault_text.partition(" ")
        ranks = ("is missing", "is not text")
        rank = next((n for n, begins in enumerate(ranks) if wrong.startswith(begins)), len(ranks))
        return (columns.index(column) if column in columns else len(columns)), rank

    return {text: sorted(set(faults[text])) for text in sorted(faults, key=place)}


def _merge(faults: Faults, found: Faults, first: int) -> None:
    for text, rows in found.items():
        faults.setdefault(text, []).extend(first + row for row in rows)
