"""Functions that run in a policy's ranks: each rank reads its rows and keeps the results."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_rl_core.distributed.batched_data_dict import (
    BatchedDataDict,
    Block,
    RemoteRows,
    as_block,
    from_block,
)
from nemo_rl_core.distributed.packing.row_shards import ShardedRows
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.columns import training_columns

Figures = Mapping[str, Callable[[BatchedDataDict], Any]]
"""Functions of a rank's rows, by the name of the value that they return."""
ROW_FIGURES = frozenset({"kl_penalties", "mean_advantages"})
"""Figures with one value per row, which become columns `[B]`."""
Columns = Callable[[BatchedDataDict], Mapping[str, Tensor]]
"""A function of a rank's rows that returns further columns."""


def _read(rows: Block) -> BatchedDataDict:
    batch = rows if isinstance(rows, BatchedDataDict) else BatchedDataDict(from_block(rows))
    return training_columns(batch)


def compute(
    backend: Any, batch: Block, *, what: str, names: Sequence[str], **options: Any
) -> tuple[None, Block]:
    """Calls a method of the backend that returns one or more tensors of the rows."""
    values = getattr(backend, what)(batch=_read(batch), **options)
    return None, as_block(dict(zip(names, values if len(names) > 1 else (values,), strict=True)))


def train_step(backend: Any, batch: Block, **options: Any) -> Any:
    """Runs an optimizer step."""
    return backend.train_step(batch=_read(batch), **options)


@dataclass(frozen=True)
class Computed:
    """Results of one call of all ranks on a batch.

    Attributes:
        columns: Computed columns in the order of the batch; remote if the batch is.
        figures: One value per rank, by the name of the function that returned it.
        seconds: Time that the first rank spent on scores.
        order: `[B]` row numbers in the batch, sorted by rank.
    """

    columns: BatchedDataDict
    figures: dict[str, list[Any]]
    metrics: dict[str, Any]
    seconds: float
    order: "np.ndarray[Any, np.dtype[np.int64]]"

    def of_rows(self, name: str) -> Tensor:
        """Returns a figure that has one value per row: `[B]`, in the order of the batch."""
        values = np.concatenate(self.figures[name])
        ordered = np.empty_like(values)
        ordered[self.order] = values
        return torch.from_numpy(ordered)


def with_results(batch: BatchedDataDict, computed: Computed) -> BatchedDataDict:
    """Returns a copy of the batch with computed columns, and with figures of one value per row."""
    rows = {name: computed.of_rows(name) for name in ROW_FIGURES & computed.figures.keys()}
    return BatchedDataDict({**batch, **computed.columns, **rows})


@dataclass(frozen=True)
class RankAnswer:
    """The part of a rank's results that is sent to the controller.

    Attributes:
        columns: Names of the computed columns, which stay in the object store.
        figures: Results of the functions of the rows, with arrays instead of tensors.
    """

    columns: tuple[str, ...]
    metrics: dict[str, Any] | None
    figures: Block
    seconds: float


def compute_together(
    backend: Any,
    batch: Block,
    *,
    scores: Mapping[str, str],
    derived: Columns | None,
    loss_fn: LossFunction | None,
    figures: Figures,
) -> tuple[RankAnswer, Block]:
    """Computes everything that a step needs before its optimizer step, so that rows are read once.

    Args:
        scores: Methods of the backend that return one value per token, by the name of their column.
            Later methods, the loss and the figures can read the column.
        derived: Function of the rows and scores that returns columns for the loss and the figures.
        loss_fn: Loss whose gradients are computed; the logprobs of its forward pass become the
            column `prev_logprobs`. None computes no gradients.
        figures: Functions of the rows and of all computed columns.
    """
    columns, computed, started = _read(batch), {}, time.perf_counter()
    for name, method in scores.items():
        computed[name] = columns[name] = getattr(backend, method)(batch=columns)
    seconds, metrics = time.perf_counter() - started, None
    if derived is not None:
        derived_columns = derived(columns)
        computed.update(derived_columns)
        columns.update(derived_columns)
    if loss_fn is not None:
        metrics, logprobs = backend.forward_backward(batch=columns, loss_fn=loss_fn)
        computed["prev_logprobs"] = columns["prev_logprobs"] = logprobs
    answers = as_block({name: function(columns) for name, function in figures.items()})
    return RankAnswer(tuple(computed), metrics, answers, seconds), as_block(computed)


def restored(
    references: Sequence[Any], shards: ShardedRows, names: Sequence[str], *, is_remote: bool
) -> BatchedDataDict:
    """Returns the ranks' columns in the order of the batch: remote ones, or their values."""
    rows = RemoteRows.of_blocks(references, shards.sizes).reordered(shards.order)
    columns = {name: rows.of_column(name) for name in names}
    if is_remote:
        return BatchedDataDict(columns)
    return BatchedDataDict({name: column.fetched()[name] for name, column in columns.items()})
