"""Properties of every loss function, checked on a step of any rows."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nemo_rl_core.functional.protocols import LossFunction

Batch = dict[str, Tensor]
Result = tuple[Tensor, dict[str, Tensor]]
Run = Callable[..., Result]
"""Calls a loss with its first argument and a batch; `step` is the full step of a micro-batch."""


def call_loss(
    loss_fn: LossFunction, first: Tensor, batch: Batch, *, reads: str, step: Batch | None = None
) -> Result:
    """Calls a loss with the global counts that it reads; a count that it must not read is NaN.

    Args:
        loss_fn: The loss.
        first: Its first argument, such as logprobs `[B, T-1]`.
        batch: A full step or a micro-batch.
        reads: `sequences`, `tokens` or `both`.
        step: The full step; None takes `batch`.
    """
    step = batch if step is None else step
    counts = [torch.tensor(math.nan), torch.tensor(math.nan)]
    is_valid = step["sample_mask"].bool()
    if reads != "tokens":
        counts[0] = is_valid.sum().float()
    if reads != "sequences":
        counts[1] = (step["token_mask"].bool() & is_valid[:, None]).sum().float()
    return loss_fn(first, batch, global_valid_seqs=counts[0], global_valid_tokens=counts[1])


def check_gradient(run: Run, first: Tensor, batch: Batch, *, leaf: str | None = None) -> None:
    """Compares the gradient with differences; `leaf` names a column instead of `first`."""
    values = (first if leaf is None else batch[leaf]).clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda leaf_: run(*_with(leaf_, first, batch, leaf))[0], values)


def check_microbatches(
    run: Run,
    first: Tensor,
    batch: Batch,
    parts: Iterable[Any],
    *,
    leaf: str | None = None,
    **tolerances: float,
) -> None:
    """Checks that loss, metrics and gradient of micro-batches sum to those of the step.

    Args:
        run: The loss.
        first: First argument of the step.
        batch: Columns of the step.
        parts: Indices or masks of the rows of each micro-batch; some may be empty.
        leaf: Column whose gradient is compared; None takes `first`.
        **tolerances: `atol` and `rtol` of the sums; by default those of `assert_close`.
    """
    values = first if leaf is None else batch[leaf]
    full, split = values.clone().requires_grad_(), values.clone().requires_grad_()
    loss, metrics = run(*_with(full, first, batch, leaf))
    loss.backward()
    results = []
    for rows in parts:
        first_part, columns = _with(split, first, batch, leaf)
        micro = {name: column[rows] for name, column in columns.items()}
        results.append(run(first_part[rows], micro, step=batch))
        results[-1][0].backward()
    torch.testing.assert_close(sum(value for value, _ in results), loss, **tolerances)
    torch.testing.assert_close(split.grad, full.grad)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(each[name] for _, each in results), value, **tolerances)


def check_poison(
    run: Run,
    clean: tuple[Tensor, Batch],
    dirty: tuple[Tensor, Batch],
    read: Tensor,
    *,
    leaf: str | None = None,
) -> None:
    """Checks that poisoned entries change nothing and have a gradient of exactly 0.

    Args:
        run: The loss.
        clean: First argument and batch.
        dirty: The same with poison; rows may be longer.
        read: Bool mask of the clean entries that are read, `[B, T]`.
        leaf: Column whose gradient is compared; None takes the first argument.
    """
    values, poisoned = (
        (first if leaf is None else batch[leaf]).clone().requires_grad_()
        for first, batch in (clean, dirty)
    )
    loss, metrics = run(*_with(values, *clean, leaf))
    loss.backward()
    # With anomaly detection, since intermediate NaNs of padding in the backward pass would mislead
    # someone who searches for a real NaN. A batch without a valid token still has a graph.
    with torch.autograd.set_detect_anomaly(True):
        dirty_loss, dirty_metrics = run(*_with(poisoned, *dirty, leaf))
        dirty_loss.backward()
    torch.testing.assert_close(dirty_loss, loss)
    for name, value in metrics.items():
        torch.testing.assert_close(dirty_metrics[name], value)
    check_metrics_are_detached_scalars((loss, metrics))
    assert values.grad is not None
    assert poisoned.grad is not None
    width = values.shape[1]
    torch.testing.assert_close(poisoned.grad[:, :width], values.grad)
    assert (poisoned.grad[:, width:] == 0).all()
    assert (poisoned.grad[:, :width][~read] == 0).all()


def check_metrics_are_detached_scalars(result: Result) -> None:
    """Checks that only the loss has a graph, and that nothing has a dimension."""
    loss, metrics = result
    assert loss.requires_grad
    assert loss.ndim == 0
    assert all(value.ndim == 0 and not value.requires_grad for value in metrics.values())


def _with(values: Tensor, first: Tensor, batch: Batch, leaf: str | None) -> tuple[Tensor, Batch]:
    return (values, batch) if leaf is None else (first, batch | {leaf: values})
