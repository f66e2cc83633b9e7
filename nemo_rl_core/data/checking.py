"""One pass over rows that finds all their faults, one chunk at a time.

A chunk of text columns is first checked with vectorized operations. Where they do not prove it
valid, and for chunks of rows, the pandera schema and the content checks inspect every row.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pandas as pd
import pyarrow as pa

from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data import checks, chunks, columnwise
from nemo_rl_core.data.chunks import Chunk, ChunkedRows, chunks_of, column_names, rows_of
from nemo_rl_core.data.digests import repeats
from nemo_rl_core.data.frames import (
    SCHEMAS,
    Faults,
    RowKind,
    RowSchema,
    Schema,
    SftSchema,
    check_frame,
    describe_faults,
    records_of,
    row_kind,
    schema_faults,
    schema_of,
)
from nemo_rl_core.data.tables import TableRows, TableWriter, table_of
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
_OPTIONAL = ("margin", "max_tokens", "tools")

_SCHEMAS: dict[RowKind, Schema] = {**SCHEMAS, "prompts": SftSchema}
_ALL_OR_NONE = ("answer", "completion")
"""Columns of prompts that are empty in all rows, or in none."""


class _EmptyColumns:
    """Finds columns that are empty in some chunks and not in others."""

    def __init__(self) -> None:
        self._empty: dict[str, list[range]] = {name: [] for name in _ALL_OR_NONE}
        self._nonempty: set[str] = set()

    def add(self, rows: "pd.DataFrame | pa.Table", columns: Sequence[str], first: int) -> None:
        for name in {*_ALL_OR_NONE} & {*columns}:
            if columnwise.has_value(rows, name):
                self._nonempty.add(name)
            else:
                self._empty[name].append(range(first, first + len(rows)))

    def faults(self) -> Faults:
        return {
            f"{name} is empty": [*chain.from_iterable(self._empty[name])]
            for name in self._nonempty
            if self._empty[name]
        }


class RowChecking:
    """Checks rows of one kind.

    Args:
        tokenizer: Tokenizer that measures lengths and masks; None skips those checks.

    Attributes:
        columns: Columns that occur in any row.
        surrogates: Rows whose text cannot be encoded; no other check runs if there are any.
        has_readable_rows: Whether all rows have the columns of their kind, with text in them.
        faults: Invalid rows under any policy.
        unknown_characters: Characters of prompts that have no token, in order of occurrence.
        too_long: Prompts longer than `max_prompt_tokens`.
        longer: Rows longer than `policy.max_sequence_tokens`.
        equal_pairs: Pairs whose sequences have the same tokens after truncation.
        unwritten_keys: Keys of turns that the chat template does not write, with their first row.
        longest_prompt: Tokens of the longest prompt; infinity if it was too long to count.
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
        columns = (*_COLUMNS[self._kind], *_OPTIONAL)
        self._kept_columns = [name for name in columns if name in self.columns]
        self._has_parts = isinstance(rows, ChunkedRows) or len(rows) > chunks.MAX_ROWS
        self._texts = _columns_with_text(rows) if self._has_parts else set()
        self._empty_columns = _EmptyColumns()
        self._unknown, self._meaning, self._untrained = Faults(), Faults(), Faults()
        self._inseparable: DataError | None = None
        self.has_readable_rows = False
        self.surrogates, self.faults = Faults(), Faults()
        self.unknown_characters: dict[str, None] = {}
        self.too_long, self.longer, self.equal_pairs = Faults(), Faults(), Faults()
        self.unwritten_keys: dict[str, int] = {}
        self._seen_keys: set[tuple[str, str]] = set()
        self.longest_prompt = 0.0

    def checked(self) -> pa.Table | None:
        """Checks all rows.

        Returns:
            A table of the columns of their kind; None if they have faults.

        Raises:
            DataError: When the chat template cannot separate the turns of a row (names the row),
                and the earlier checks passed.
        """
        writer = TableWriter()
        frame: pd.DataFrame | None = None
        first = 0
        for chunk in chunks_of(self._rows):
            result = self._chunk(chunk, first)
            if isinstance(result, pd.DataFrame) and len(chunk) == len(self._rows):
                frame = result
            elif result is not None:
                writer.add(table_of(result) if isinstance(result, pd.DataFrame) else result)
            first += len(chunk)
        self._check_across_chunks()
        self.faults = _in_order(self.faults, self._kept_columns) | self._unknown
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
        return table_of(frame) if frame is not None else writer.close()

    def _chunk(self, chunk: Chunk, first: int) -> "pd.DataFrame | pa.Table | None":
        is_proved = (
            not isinstance(chunk, list)
            and {*self._kept_columns} <= {*chunk.column_names}
            and columnwise.is_valid(chunk.select(self._kept_columns), self._kind)
        )
        checked: Any
        if is_proved and not isinstance(chunk, list):
            # The text type of pandas.
            schema = pa.schema([(name, pa.large_string()) for name in self._kept_columns])
            checked = chunk.select(self._kept_columns).cast(schema)
            rows: Sequence[Row] | None = None
        else:
            rows = rows_of(chunk)
            if surrogates := checks.surrogate_faults(rows):
                _merge(self.surrogates, surrogates, first)
            if self.surrogates:
                return None
            checked = self._frame(rows)
            _merge(self.faults, schema_faults(_SCHEMAS[self._kind], checked), first)
        if self._kind == "prompts":
            self._empty_columns.add(checked, self._kept_columns, first)
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
            _merge(self._meaning, checks.conversation_faults(rows), first)
            if not self._meaning and self._tokenizer is not None:
                found_keys = checks.unwritten(rows, self._tokenizer, self._seen_keys)
                for key, row in found_keys.items():
                    self.unwritten_keys.setdefault(key, first + row)
        if not self._meaning and self._tokenizer is not None and self._is_tokenised:
            self._check_examples(checked, first)
        return checked

    @property
    def _is_tokenised(self) -> bool:
        # Prompts that are only sampled from have no completion whose length matters.
        return self._kind != "prompts" or self._policy.max_sequence_tokens is not None

    def _check_examples(self, checked: Any, first: int) -> None:
        if self._inseparable is not None:
            return
        rows = records_of(checked) if isinstance(checked, pd.DataFrame) else rows_of(checked)
        try:
            untrained, longer, equal = checks.example_faults(
                rows, self._tokenizer, self._policy, first=first, limit_name=self._limit_name
            )
        except DataError as error:
            self._inseparable = error
            return
        _merge(self._untrained, untrained, first)
        _merge(self.longer, longer, first)
        _merge(self.equal_pairs, equal, first)

    def _frame(self, rows: Sequence[Row]) -> pd.DataFrame:
        # A column of only numbers or only nulls keeps its type, so that the schema can refuse it.
        frame = pd.DataFrame(list(rows))
        if self._kind == "conversations" and "mask" not in frame and "mask" not in self._texts:
            frame["mask"] = self._policy.mask
        frame = frame.reindex(columns=self._kept_columns)
        if "tools" in frame:
            frame["tools"] = frame["tools"].fillna("[]").astype("str")
        for name in self._texts.intersection(self._kept_columns):
            if frame[name].isna().all():  # text in other chunks
                frame[name] = frame[name].astype("str")
        return frame

    def _check_across_chunks(self) -> None:
        if self.surrogates or not self._has_parts:
            return
        _merge(self.faults, self._empty_columns.faults(), 0)
        if "id" in self.columns and (twice := repeats(self._rows, _ids_of)):
            self.faults["id occurs twice"] = twice


def check_stored(frame: pd.DataFrame, *, name: str) -> None:
    """Raises if a table does not match the schema of its columns, like `frames.check_frame`.

    Large tables are checked in parts, since the checks copy their input.
    """
    columns = [str(column) for column in frame.columns]
    schema = schema_of(columns)
    if len(frame) <= chunks.MAX_ROWS or not issubclass(schema, RowSchema):
        check_frame(schema, frame, name=name)
        return
    kind = row_kind(columns)
    rows = TableRows(table_of(frame))
    faults = Faults()
    empty_columns = _EmptyColumns()
    first = 0
    for table in rows.chunks():
        if not columnwise.is_valid(table, kind):
            part = frame.iloc[first : first + len(table)].reset_index(drop=True)
            _merge(faults, schema_faults(schema, part), first)
        if kind == "prompts":
            empty_columns.add(table, columns, first)
        first += len(table)
    _merge(faults, empty_columns.faults(), 0)
    if twice := repeats(rows, _ids_of):
        faults["id occurs twice"] = twice
    if faults:
        raise describe_faults(_in_order(faults, columns), name)


def _ids_of(chunk: Chunk) -> Sequence[str]:
    if isinstance(chunk, list):
        return [str(row.get("id")) for row in chunk]
    texts: list[str] = chunk.column("id").fill_null("None").to_pylist()
    return texts


def _columns_with_text(rows: Sequence[Row]) -> set[str]:
    names: set[str] = set()
    for chunk in chunks_of(rows):
        if not isinstance(chunk, list):
            columns = zip(chunk.column_names, chunk.columns, strict=True)
            texts = ((name, column) for name, column in columns if columnwise.is_text(column.type))
            names |= {name for name, column in texts if column.null_count < len(chunk)}
            continue
        for name in column_names(chunk):
            if name not in names and any(isinstance(row.get(name), str) for row in chunk):
                names.add(name)
    return names


def _in_order(faults: Faults, columns: Sequence[str]) -> Faults:
    """Sorts faults by column, then: missing, of the wrong type, other faults."""

    def sort_key(fault_text: str) -> tuple[int, int]:
        column, _, wrong = fault_text.partition(" ")
        ranks = ("is missing", "is not text")
        rank = next((n for n, start in enumerate(ranks) if wrong.startswith(start)), len(ranks))
        return (columns.index(column) if column in columns else len(columns)), rank

    return {text: sorted(set(faults[text])) for text in sorted(faults, key=sort_key)}


def _merge(faults: Faults, new: Faults, first: int) -> None:
    for text, rows in new.items():
        faults.setdefault(text, []).extend(first + row for row in rows)
