"""Data set folders, and batches that depend only on seed and step."""

import json
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from nemo_rl_core.data import chunks
from nemo_rl_core.data.chat import prompt_token_ids, tokenize_row
from nemo_rl_core.data.chunks import ChunkedRows
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.data.tables import (
    TableRows,
    memory_mapped,
    rechunked,
    rows_of_frame,
    rows_per_group,
    table_of,
)
from nemo_rl_core.data.tokenized import examples_of, is_storable, stored_tokens
from nemo_rl_core.data.tools import ToolsByTask, shown_tools
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Prompt, Row

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

T = TypeVar("T")

ROWS_FILE = "rows.parquet"
"""Name of the only file in a data set folder."""


class PromptLoader(Generic[T]):
    """Batches from shuffled passes over the data.

    The rows of all epochs, each shuffled separately, form one endless sequence, and step `k` takes
    the slice from `k * batch_size`. Each row therefore occurs once per epoch for any batch size,
    and resuming at any step needs no saved state: a new loader returns the same batches. A batch
    across two epochs may contain a row twice.

    Args:
        prompts: The items.
        batch_size: Items per step.
        seed: Seed of the order.

    Raises:
        DataError: When a batch would be larger than the data set.

    Example:
        >>> loader = PromptLoader("abc", batch_size=2, seed=0)
        >>> sorted((loader.batch(0) + loader.batch(1) + loader.batch(2)))
        ['a', 'a', 'b', 'b', 'c', 'c']
    """

    def __init__(self, prompts: Sequence[T], *, batch_size: int, seed: int) -> None:
        if batch_size < 1 or batch_size > len(prompts):
            raise DataError(
                "a step needs more rows than the data set has",
                expected=f"a batch of 1 to {len(prompts)} rows",
                got=str(batch_size),
                fix="use more data (num_train), or fewer rows per step (num_prompts_per_step, "
                "num_pairs_per_step, or global_batch_size of sft)",
            )
        self._prompts = prompts
        self._batch_size = batch_size
        self._seed = seed
        self._orders: dict[int, Sequence[int]] = {}

    def batch(self, step: int) -> list[T]:
        """Returns the items of a step, counted from 0."""
        first = step * self._batch_size
        indices = range(first, first + self._batch_size)
        epochs = {index // len(self._prompts) for index in indices}
        self._orders = {epoch: self._order(epoch) for epoch in epochs}
        return [
            self._prompts[self._orders[index // len(self._prompts)][index % len(self._prompts)]]
            for index in indices
        ]

    def epoch(self, step: int) -> int:
        """Returns the epoch, counted from 0, of the first item of a step."""
        return step * self._batch_size // len(self._prompts)

    def _order(self, epoch: int) -> Sequence[int]:
        if epoch in self._orders:
            return self._orders[epoch]
        order = array("q", range(len(self._prompts)))
        # A string seed is hashed with SHA-512. With `seed + epoch`, epoch 1 of seed 0 would equal
        # epoch 0 of seed 1.
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def save_frame(frame: "pd.DataFrame", folder: Path) -> Path:
    """Writes a data set folder and returns the path of its file; equal frames give equal bytes.

    Raises:
        DataError: Names the rows that do not match the schema of their columns.
    """
    from nemo_rl_core.data.checking import check_stored

    check_stored(frame.reset_index(drop=True), name=folder.name)
    return save_rows(table_of(frame), folder)


def save_rows(rows: "pa.Table", folder: Path) -> Path:
    """Writes checked rows like `save_frame`; equal rows give equal bytes."""
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    size = rows_per_group(TableRows(rows).chunks())
    writer: pq.ParquetWriter | None = None
    try:
        for table in rechunked(TableRows(rows).chunks(), size):
            writer = writer or pq.ParquetWriter(folder / ROWS_FILE, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    return folder / ROWS_FILE


def load_frame(folder: Path) -> "pd.DataFrame":
    """Loads the rows of a data set folder; many rows are a view of a memory-mapped file.

    Raises:
        DataError: When the folder has no readable rows, or rows that fail their schema (names
            them).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from nemo_rl_core.data.checking import check_stored

    path = Path(folder) / ROWS_FILE
    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
            batches = file.iter_batches(chunks.MAX_ROWS)
            tables = (pa.Table.from_batches([batch]) for batch in batches)
            is_small = file.metadata.num_rows <= chunks.MAX_ROWS
            frame: pd.DataFrame = (file.read() if is_small else memory_mapped(tables)).to_pandas()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"the data set folder {folder} cannot be read",
            expected=f"a folder with a parquet file {ROWS_FILE}",
            got=f"{type(error).__name__}: {str(error)[:160]}",
            fix="run the stage prepare_data again",
        ) from error
    check_stored(frame, name=str(folder))
    return frame


def load_records(folder: Path) -> Sequence[Row]:
    """Loads the rows of a data set folder as mappings, in the order of the file.

    The result is a list of few rows; many are read on access from a memory-mapped file.

    Raises:
        DataError: When the folder has no readable rows.
    """
    return rows_of_frame(load_frame(folder))


class LazyRows(Sequence[T]):
    """Sequence that converts each row on access."""

    def __init__(self, rows: Sequence[Any], make: Callable[[Any], T]) -> None:
        self._rows, self._make = rows, make

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._make(row) for row in self._rows[index]]
        return self._make(self._rows[index])

    def __iter__(self) -> Iterator[T]:
        return map(self._make, self._rows)


def load_prompts(
    folder: Path,
    tokenizer: Any,
    *,
    offered: ToolsByTask | None = None,
    max_prompt_tokens: int | None = None,
) -> Sequence[Prompt]:
    """Loads the rows of a data set folder as tokenized prompts, in the order of the file.

    Many prompts are tokenized on access.

    Args:
        offered: Tools of the environment; see `shown_tools`.
        max_prompt_tokens: Maximum length, for tools that were not checked with the data.

    Raises:
        DataError: When its rows are not prompts with answers, or a prompt is too long.
    """
    rows = load_records(folder)
    if rows and not {"prompt", "answer"} <= rows[0].keys():
        raise DataError(
            "the data set has no prompts with answers, so nothing can be sampled and scored",
            expected="the columns prompt and answer, or prompt and completion",
            got=f"the columns {', '.join(rows[0])}",
            fix="use rows with prompts for evaluations, GRPO, PPO and distillation, which sample "
            "completions; messages and text are for sft, pairs for dpo and reward models",
        )

    def prompt(row: Row) -> Prompt:
        tools = shown_tools(offered or {}, row)
        ids = prompt_token_ids(tokenizer, row["prompt"], tools=tools)
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            raise DataError(
                f"the prompt {row['prompt'][:80]!r} is too long with the tools of the environment",
                expected=f"at most {max_prompt_tokens} tokens (data.max_prompt_tokens)",
                got=f"{len(ids)} tokens",
                fix="raise data.max_prompt_tokens, or offer fewer tools",
            )
        return Prompt(
            id=row["id"],
            text=row["prompt"],
            token_ids=tuple(ids),
            answer=row["answer"],
            task=row["task"],
            metadata=row["metadata"],
            tools=json.dumps(tools, ensure_ascii=False),
        )

    return LazyRows(rows, prompt) if isinstance(rows, ChunkedRows) else [*map(prompt, rows)]


def token_sequences(folder: Path, model_folder: Path, *, limit: int) -> list[tuple[int, ...]]:
    """Tokenizes the first rows of a data set of any kind, completions included.

    Args:
        limit: Number of rows; a preference pair gives two sequences.
    """
    tokenizer = load_tokenizer(model_folder)
    examples = (tokenize_row(tokenizer, row) for row in load_records(folder)[:limit])
    return [example.token_ids for row in examples for example in row.values()]


def load_tokenized(
    folder: Path, rows: Sequence[Row], tokenizer: Any, offered: ToolsByTask | None = None
) -> Sequence[dict[str, SupervisedExample]]:
    """Returns `tokenize_row` of the rows of a data set folder.

    Many rows are tokenized by several processes, once for all runs on the same rows, and read on
    access from a memory-mapped file.

    Raises:
        DataError: When the turns of a row cannot be separated.
    """
    if is_storable(tokenizer, len(rows)):
        tokens = stored_tokens(Path(folder) / ROWS_FILE, tokenizer, len(rows), offered or {})
        return LazyRows(tokens, examples_of)
    return [tokenize_row(tokenizer, row, offered) for row in rows]
