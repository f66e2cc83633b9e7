"""Batches of prompts from rows, for custom training loops."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.tools import tools_of
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import DataError


class BatchedDataLoader:
    """Yields rows as batches of prompts, in order; the last one may be smaller.

    Args:
        dataset: Rows with `input_ids`, or with `prompt` if a tokenizer is given. The batch has
            their other columns as lists.
        batch_size: Rows per batch.
        tokenizer: Tokenizer of the prompts, which applies its chat template if it has one.

    Example:
        >>> rows = [{"input_ids": [1, 5], "answer": "4"}, {"input_ids": [1], "answer": "5"}]
        >>> (batch,) = BatchedDataLoader(rows, batch_size=2)
        >>> batch["input_ids"].tolist(), batch["input_lengths"].tolist(), batch["answer"]
        ([[1, 5], [1, 0]], [2, 1], ['4', '5'])
    """

    def __init__(
        self, dataset: Sequence[Mapping[str, Any]], batch_size: int = 8, *, tokenizer: Any = None
    ) -> None:
        self._rows, self._size, self._tokenizer = dataset, batch_size, tokenizer

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._size)

    def __iter__(self) -> Iterator[BatchedDataDict]:
        for start in range(0, len(self._rows), self._size):
            numbers = range(start, min(start + self._size, len(self._rows)))
            yield self._batch([self._rows[number] for number in numbers])

    def _batch(self, rows: Sequence[Mapping[str, Any]]) -> BatchedDataDict:
        prompts = [self._token_ids(row) for row in rows]
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        others = [name for name in rows[0] if name != "input_ids"]
        columns = {name: [row[name] for row in rows] for name in others}
        batch = {**columns, "input_ids": ids, "input_lengths": torch.tensor(lengths)}
        return BatchedDataDict(batch)

    def _token_ids(self, row: Mapping[str, Any]) -> list[int]:
        if "input_ids" in row:
            return list(row["input_ids"])
        if self._tokenizer is not None and "prompt" in row:
            return list(prompt_token_ids(self._tokenizer, row["prompt"], tools=tools_of(row)))
        raise DataError(
            "a row has no tokens",
            expected="input_ids; or prompt, with BatchedDataLoader(rows, tokenizer=...)",
            got=f"the columns {', '.join(row)}",
            fix="tokenize the rows, or pass a tokenizer",
        )
