"""Data set folders, and batches that are a pure function of seed and step."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nemo_rl_core.data.chat import prompt_token_ids, tokenize_row
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Prompt, Row

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

ROWS_FILE = "rows.parquet"
"""The one file of a data set folder."""


class PromptLoader(Generic[T]):
    """Batches from shuffled passes over the data.

    The rows of all epochs, each shuffled on its own, form one endless sequence, and step `k` takes
    the slice from `k * batch_size`. Each row therefore comes once per epoch for any batch size, and
    resuming at any step needs no saved state: a new loader returns the same batches. A batch across
    two epochs may hold a row twice.

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
                "a step takes more rows than the data set has",
                expected=f"a batch of 1 to {len(prompts)} rows",
                got=str(batch_size),
                fix="use more data (num_train), or fewer rows a step (num_prompts_per_step, "
                "num_pairs_per_step, or global_batch_size of sft)",
            )
        self._prompts = prompts
        self._batch_size = batch_size
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def batch(self, step: int) -> list[T]:
        """The items of a step, which counts from 0."""
        first = step * self._batch_size
        indices = range(first, first + self._batch_size)
        epochs = {index // len(self._prompts) for index in indices}
        self._orders = {epoch: self._order(epoch) for epoch in epochs}
        return [
            self._prompts[self._orders[index // len(self._prompts)][index % len(self._prompts)]]
            for index in indices
        ]

    def epoch(self, step: int) -> int:
        """The pass over the data, from 0, that the first item of a step belongs to."""
        return step * self._batch_size // len(self._prompts)

    def _order(self, epoch: int) -> list[int]:
        if epoch in self._orders:
            return self._orders[epoch]
        order = list(range(len(self._prompts)))
        # A string seed is hashed with SHA-512: `seed + epoch` would make epoch 1 of seed 0 the same
        # as epoch 0 of seed 1.
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def save_frame(frame: "pd.DataFrame", folder: Path) -> Path:
    """Writes a data set folder; equal frames give equal bytes.

    Returns:
        The file that was written.

    Raises:
        DataError: Names the rows that do not match the schema of their columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from nemo_rl_core.data.frames import check_frame, schema_of

    columns = [str(column) for column in frame.columns]
    check_frame(schema_of(columns), frame.reset_index(drop=True), name=folder.name)
    folder.mkdir(parents=True, exist_ok=True)
    # pandas' metadata would make the content hash depend on its version.
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    pq.write_table(table, folder / ROWS_FILE)
    return folder / ROWS_FILE


def load_frame(folder: Path) -> "pd.DataFrame":
    """The rows of a data set folder.

    Raises:
        DataError: When the folder holds no readable rows, or rows that fail their schema (names
            them).
    """
    import pandas as pd
    import pyarrow as pa

    from nemo_rl_core.data.frames import check_frame, schema_of

    path = Path(folder) / ROWS_FILE
    try:
        frame = pd.read_parquet(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"the data set folder {folder} cannot be read",
            expected=f"a parquet file {ROWS_FILE} in it",
            got=f"{type(error).__name__}: {str(error)[:160]}",
            fix="run the stage prepare_data again",
        ) from error
    columns = [str(column) for column in frame.columns]
    check_frame(schema_of(columns), frame, name=str(folder))
    return frame


def load_records(folder: Path) -> list[Row]:
    """The rows of a data set folder, each by its columns' names, in the order of the file.

    Raises:
        DataError: When the folder holds no readable rows.
    """
    from nemo_rl_core.data.frames import records_of

    return records_of(load_frame(folder))


def load_prompts(folder: Path, tokenizer: Any) -> list[Prompt]:
    """The rows of a data set folder as prompts, tokenized, in the order of the file.

    Args:
        folder: A folder that `save_frame` wrote.
        tokenizer: The model's tokenizer.

    Raises:
        DataError: When its rows are not prompts with answers.
    """
    rows = load_records(folder)
    if rows and not {"prompt", "answer"} <= rows[0].keys():
        raise DataError(
            "the data set holds no prompts with answers, so nothing can be sampled and scored",
            expected="the columns prompt and answer, or prompt and completion",
            got=f"the columns {', '.join(rows[0])}",
            fix="train on it with sft (messages, text), or dpo or a reward model (pairs)",
        )
    return [
        Prompt(
            id=row["id"],
            text=row["prompt"],
            token_ids=tuple(prompt_token_ids(tokenizer, row["prompt"])),
            answer=row["answer"],
            task=row["task"],
            metadata=row["metadata"],
        )
        for row in rows
    ]


def token_sequences(folder: Path, model_folder: Path, *, limit: int) -> list[tuple[int, ...]]:
    """The first rows of a data set of any kind as token sequences, completions included.

    Args:
        folder: A folder that `save_frame` wrote.
        model_folder: The folder of the tokenizer.
        limit: Number of rows; a preference pair gives two sequences.
    """
    tokenizer = load_tokenizer(model_folder)
    examples = (tokenize_row(tokenizer, row) for row in load_records(folder)[:limit])
    return [example.token_ids for row in examples for example in row.values()]
