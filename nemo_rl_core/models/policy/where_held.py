"""What a policy's ranks do with rows that lie elsewhere: they read their own, and keep results.

The functions run in the workers, with the rank's backend as their first argument and its rows as
the second.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.held_rows import Block, HeldRows, as_block, from_block
from nemo_rl_core.distributed.packing.deal import DealtRows
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.columns import training_columns

Figures = Mapping[str, Callable[[BatchedDataDict], Any]]
"""Functions of a rank's rows, by the names of what they return."""
Columns = Callable[[BatchedDataDict], Mapping[str, Tensor]]
"""A function of a rank's rows that returns columns of them."""


def _read(batch: Block) -> BatchedDataDict:
    """A rank's rows with the values of all columns that training reads."""
    return training_columns(BatchedDataDict(from_block(batch)).fetched())


def compute(
    backend: Any, batch: Block, *, what: str, names: Sequence[str], **options: Any
) -> tuple[None, Block]:
    """A method of the backend that returns a tensor, or several, of the rows."""
    found = getattr(backend, what)(batch=_read(batch), **options)
    return None, as_block(dict(zip(names, found if len(names) > 1 else (found,), strict=True)))


def train_step(backend: Any, batch: Block, **options: Any) -> Any:
    """An optimizer step."""
    return backend.train_step(batch=_read(batch), **options)


@dataclass(frozen=True)
class HeldAnswer:
    """What a rank returns of `compute_together`, beside what stays with it.

    Attributes:
        columns: The names of what stays with it.
        metrics: Of the loss; None without one.
        figures: What the functions of the rows return, with arrays in place of tensors.
        seconds: Of the scores, before the loss.
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
) -> tuple[HeldAnswer, Block]:
    """All that a step computes before its optimizer step, so that rows are read once.

    Args:
        backend: The rank's.
        batch: Its rows.
        scores: Methods of the backend that return a value a token, by the columns that they
            become, which the methods after them, the loss and the figures read.
        derived: A function of the rows and the scores, whose columns the loss and the figures
            read, too.
        loss_fn: Of which the gradients are computed; the logprobs of the forward pass become the
            column `prev_logprobs`. None for scores alone.
        figures: Functions of the rows and the columns that were computed.

    Returns:
        The answer, and the columns that were computed.
    """
    columns, computed, started = _read(batch), {}, time.perf_counter()
    for name, method in scores.items():
        computed[name] = columns[name] = getattr(backend, method)(batch=columns)
    seconds, metrics = time.perf_counter() - started, None
    if derived is not None:
        found = derived(columns)
        computed.update(found)
        columns.update(found)
    if loss_fn is not None:
        metrics, logprobs = backend.forward_backward(batch=columns, loss_fn=loss_fn)
        computed["prev_logprobs"] = columns["prev_logprobs"] = logprobs
    answers = as_block({name: function(columns) for name, function in figures.items()})
    return HeldAnswer(tuple(computed), metrics, answers, seconds), as_block(computed)


def joined(references: Sequence[Any], dealt: DealtRows, names: Sequence[str]) -> BatchedDataDict:
    """Columns of what the ranks have computed of their rows, in the order of the batch.

    Args:
        references: Of the ranks' blocks.
        dealt: Their rows.
        names: Of the columns, as the blocks have them.
    """
    rows = HeldRows.of_blocks(references, dealt.sizes).reordered(dealt.order)
    return BatchedDataDict({name: rows.of_column(name) for name in names})
