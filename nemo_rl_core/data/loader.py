"""Rows on disk, and the order in which they are used."""

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import pandas as pd

from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Prompt

T = TypeVar("T")
ROWS_FILE = "rows.parquet"


def save_frame(frame: pd.DataFrame, folder: Path) -> None:
    """Writes rows as `rows.parquet`; the same rows give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(folder / ROWS_FILE, index=False)


def load_frame(folder: Path) -> pd.DataFrame:
    """Reads what `save_frame` wrote."""
    return pd.read_parquet(folder / ROWS_FILE)


def load_prompts(folder: Path, tokenizer: Any) -> list[Prompt]:
    """All rows of a data set folder as prompts, tokenized."""
    frame = load_frame(folder)
    columns = ("id", "prompt", "answer", "task", "metadata")
    return [
        Prompt(
            id=str(key),
            text=text,
            token_ids=tuple(prompt_token_ids(tokenizer, text)),
            answer=answer,
            task=task,
            metadata=metadata,
        )
        for key, text, answer, task, metadata in zip(*(frame[c] for c in columns), strict=True)
    ]


class PromptLoader(Generic[T]):
    """Batches in shuffled order, epoch after epoch, as a pure function of the step.

    There is no position to save: a resumed run asks for the next step and gets its rows.

    Args:
        rows: What to draw from.
        batch_size: Rows a step; a batch may span the border of two epochs.
        seed: Of the order; every epoch has another.

    Raises:
        DataError: If there are fewer rows than a batch takes.

    Example:
        >>> loader = PromptLoader(["a", "b", "c"], batch_size=2, seed=0)
        >>> sorted(loader.batch(0) + loader.batch(1)[:1])
        ['a', 'b', 'c']
    """

    def __init__(self, rows: Sequence[T], *, batch_size: int, seed: int) -> None:
        if len(rows) < batch_size:
            raise DataError(
                "the data set has fewer rows than one step takes",
                expected=f"at least {batch_size} rows",
                got=str(len(rows)),
                fix="lower num_prompts_per_step or global_batch_size, or bring more rows",
            )
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed

    def batch(self, step: int) -> list[T]:
        """The rows of a step, counted from 0."""
        first = step * self._batch_size
        places = range(first, first + self._batch_size)
        size = len(self._rows)
        return [
            self._rows[_permutation(size, self._seed, place // size)[place % size]]
            for place in places
        ]


@lru_cache(maxsize=8)
def _permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    order = list(range(size))
    random.Random(int.from_bytes(key, "big")).shuffle(order)
    return tuple(order)
