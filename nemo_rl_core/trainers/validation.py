"""Validation on held-out rows: its schedule and the names of its metrics."""

from collections.abc import Callable

import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.trainers.callbacks import Callbacks
from nemo_rl_core.types import VALIDATION_PREFIX


class ValidationRunner:
    """Validates at regular intervals and after the last step.

    Args:
        validate: Function that computes metrics on held-out rows.
        every_num_steps: Number of steps between validations; None for never.
        last: Number of the last step.
    """

    def __init__(
        self, validate: Callable[[], dict[str, float]], *, every_num_steps: int | None, last: int
    ) -> None:
        self._validate = validate
        self._every = every_num_steps
        self._last = last

    def is_due(self, step: int) -> bool:
        """Whether to validate after `step`."""
        return self._every is not None and (step == self._last or step % self._every == 0)

    def after_step(self, step: int, callbacks: Callbacks) -> dict[str, float]:
        """Returns metrics with names that begin with `validation_`; empty if none are due."""
        if not self.is_due(step):
            return {}
        callbacks.call("on_validation_begin", step)
        metrics = {f"{VALIDATION_PREFIX}{name}": value for name, value in self._validate().items()}
        callbacks.call("on_validation_end", step, metrics)
        return metrics


@torch.no_grad()
def loss_metrics(
    loss_fn: LossFunction, model_output: torch.Tensor, batch: BatchedDataDict
) -> dict[str, float]:
    """Computes the metrics of a loss on a full batch without training.

    `model_output` is the first argument of the loss, such as logprobs `[B, T-1]`.
    """
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    _, metrics = loss_fn(
        model_output,
        batch,
        global_valid_seqs=batch["sample_mask"].sum().float(),
        global_valid_tokens=mask.sum().float(),
    )
    return {name: value.item() for name, value in metrics.items()}
