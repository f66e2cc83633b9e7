"""Custom losses in a training step: what they return, and whether micro-batches add up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from nemo_rl_core.errors import ConfigError, MissingColumnError
from nemo_rl_core.functional.masked import valid_token_mask
from nemo_rl_core.functional.protocols import LossFunction

_OF_THE_STEP: Final = frozenset({"global_step", "grad_norm", "learning_rate", "num_valid_tokens"})
"""Metrics that a training backend or the loop adds."""
_TOLERANCE: Final = 1e-3
"""Relative difference of float32 sums in another order."""
_DIVIDE: Final = (
    "divide sums by global_valid_tokens or global_valid_seqs, as masked_sum(values, mask, "
    "denominator=global_valid_tokens) does, not by counts of the micro-batch"
)


@dataclass
class CheckedLoss:
    """A custom loss, whose results are checked.

    Attributes:
        fn: The custom loss.
        name: Name of the loss in messages.
        is_first_step: Whether to check gradients, too, and that micro-batches add up. The trainer
            sets it to False after the first step.
        prev_is_current: Whether to add the column `prev_logprobs` from the forward pass, as in the
            first optimizer step on samples.
    """

    fn: LossFunction
    name: str
    is_first_step: bool = True
    prev_is_current: bool = False

    sequence_means = frozenset[str]()
    """Metrics that are means over sequences: none, since their names are not known."""

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: Mapping[str, Any],
        *,
        global_valid_seqs: Tensor,
        global_valid_tokens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch, and its metrics with `loss`; see `LossFunction`.

        Raises:
            ConfigError: If the result is not a loss with metrics, or, in the first step, not finite
                or different for another number of micro-batches.
        """
        counts = {
            "global_valid_seqs": global_valid_seqs,
            "global_valid_tokens": global_valid_tokens,
        }
        trains = torch.is_grad_enabled()
        if self.is_first_step and trains:
            refuse_micro_batch_dependence(
                lambda logprobs, rows: self._call(logprobs, rows, counts),
                next_token_logprobs.detach(),
                batch,
                name=self.name,
                tolerance=_TOLERANCE,
            )
        loss, metrics = self._call(next_token_logprobs, batch, counts)
        if trains and not loss.requires_grad:
            raise _without_gradient(self.name)
        return loss, {"loss": loss.detach(), **metrics}

    def _call(
        self, logprobs: Tensor, batch: Mapping[str, Any], counts: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.prev_is_current:
            columns: Any = type(batch)
            batch = columns({**batch, "prev_logprobs": logprobs.detach()})
        try:
            returned = self.fn(logprobs, batch, **counts)
        except MissingColumnError as error:
            raise ConfigError(
                f"the loss {self.name} reads a column that this run does not have",
                expected=error.expected,
                got=error.got,
                fix="for reference_logprobs set loss.needs_reference: true, or kl of an algorithm "
                "with a critic; otherwise read one of the columns above",
            ) from error
        return _checked(returned, name=self.name)


def _checked(returned: Any, *, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Refuses a result that is not a 0-dim loss with 0-dim metrics; returns metrics detached."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    loss, metrics = returned if is_pair else (returned, None)
    if not isinstance(metrics, Mapping):
        raise _wrong_result(name, kind_of(returned))
    values = {"the loss": loss, **metrics}
    wrong = {key: each for key, each in values.items() if not _is_scalar(each)}
    if wrong:
        raise _wrong_result(
            name, ", ".join(f"{key}: {kind_of(each)}" for key, each in wrong.items())
        )
    if taken := sorted(_OF_THE_STEP & metrics.keys()):
        raise ConfigError(
            f"the loss {name} returned metrics with names that the trainer uses",
            got=", ".join(taken),
            fix="rename them",
        )
    return loss, {str(key): each.detach() for key, each in metrics.items()}


def _wrong_result(name: str, got: str) -> ConfigError:
    return ConfigError(
        f"the loss {name} returned a wrong type or shape",
        expected="(loss, metrics): a 0-dim tensor, and a dict of 0-dim tensors",
        got=got,
        fix="return loss, {}; reduce values per token with "
        "masked_sum(values, mask, denominator=global_valid_tokens)",
    )


Call = Callable[[Tensor, Mapping[str, Any]], tuple[Tensor, dict[str, Tensor]]]
"""A loss of logprobs and rows, with the counts of the step."""


def refuse_micro_batch_dependence(
    call: Call, logprobs: Tensor, batch: Mapping[str, Any], *, name: str, tolerance: float
) -> Tensor:
    """Refuses a loss of rows that is not the sum of its values for two parts of the rows.

    Args:
        call: The loss, with the counts of the full step.
        logprobs: `[B, T-1]`.
        batch: Its columns; rows with equal `pair_ids` stay in one part.
        name: Name of the loss in messages.
        tolerance: Largest relative difference of gradients and metrics.

    Returns:
        `[B, T-1]`, the gradient with respect to the logprobs.
    """
    loss, metrics, gradient = with_gradient(call, logprobs, batch, name=name)
    masked = ~valid_token_mask(batch["token_mask"], batch["sample_mask"])
    if bool((gradient[masked] != 0).any()):
        raise ConfigError(
            f"the loss {name} trains on masked tokens",
            expected="no gradient where token_mask or sample_mask is 0",
            got=f"gradients at {int((gradient[masked] != 0).sum())} masked tokens",
            fix="select tokens: mask = valid_token_mask(batch['token_mask'], batch['sample_mask'])"
            ", then zero_masked(values, mask) or masked_sum(values, mask, denominator=...)",
        )
    parts = halves(batch, len(logprobs), logprobs.device)
    if len(parts) < 2:
        return gradient
    total, totals, joined = torch.zeros_like(loss), dict[str, Tensor](), torch.zeros_like(gradient)
    for rows in parts:
        part = type(batch)({key: _rows(value, rows) for key, value in batch.items()})  # type: ignore[call-arg]
        value, of_part, joined[rows] = with_gradient(call, logprobs[rows], part, name=name)
        total = total + value
        for key, each in of_part.items():
            totals[key] = totals.get(key, torch.zeros_like(each)) + each
    largest, one = gradient.abs().max().clamp(min=1e-12), torch.ones_like(loss)
    # A loss or a metric may be a sum of terms that cancel, so that its rounding is not its own.
    scales = {"its gradient": largest, "the loss": torch.maximum(loss.abs(), gradient.abs().sum())}
    sums = {"its gradient": (gradient, joined), "the loss": (loss, total)}
    sums |= {
        f"the metric {key!r}": (metrics.get(key, total * 0), totals.get(key, total * 0))
        for key in {**metrics, **totals}
    }
    for what, (full, summed) in sums.items():
        scale = scales.get(what, torch.maximum(full.abs(), one))
        if bool(((full - summed).abs() > tolerance * scale).any()):
            raise ConfigError(
                f"the loss {name} depends on the number of micro-batches: {what} of "
                f"{len(logprobs)} rows is not the sum of those of two parts",
                expected=_shown(full),
                got=_shown(summed),
                fix=_DIVIDE,
            )
    return gradient


def with_gradient(
    call: Call, logprobs: Tensor, batch: Mapping[str, Any], *, name: str
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Returns the detached loss, its metrics, and its gradient `[B, T-1]`, which must be finite."""
    leaf = logprobs.detach().clone().requires_grad_()
    loss, metrics = call(leaf, batch)
    gradient = None
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    if gradient is None:
        raise _without_gradient(name)
    wrong = [key for key, each in {"loss": loss, **metrics}.items() if not each.isfinite()]
    if wrong or not gradient.isfinite().all():
        raise ConfigError(
            f"the loss {name} is not finite",
            expected="a finite loss, metrics and gradient",
            got=f"NaN or infinity in {', '.join(wrong) or 'the gradient'}",
            fix="apply zero_masked to the inputs, and bound logarithms, quotients and exponents",
        )
    return loss.detach(), metrics, gradient


def _without_gradient(name: str) -> ConfigError:
    return ConfigError(
        f"the loss {name} has no gradient",
        expected="a loss computed from next_token_logprobs, without detach() or torch.no_grad()",
        got="a result that does not depend on next_token_logprobs",
        fix="compute the loss from next_token_logprobs; without valid tokens return "
        "zero_masked(next_token_logprobs, mask).sum()",
    )


def halves(batch: Mapping[str, Any], num_rows: int, device: torch.device) -> list[Tensor]:
    """Returns the row numbers of two parts that keep pairs together; of one if there is one."""
    ids = batch["pair_ids"] if "pair_ids" in batch else torch.arange(num_rows, device=device)
    unique, index = ids.unique(return_inverse=True)
    is_second = index >= (len(unique) + 1) // 2
    parts = [part.nonzero()[:, 0] for part in (~is_second, is_second)]
    return [part for part in parts if len(part)]


def _rows(column: Any, rows: Tensor) -> Any:
    if isinstance(column, Tensor):
        return column[rows.to(column.device)]
    return [column[row] for row in rows.tolist()]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def kind_of(value: Any) -> str:
    """Returns the type of a value for messages, with the shape of a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(type(each).__name__ for each in value)})"
    return type(value).__name__


def _shown(value: Tensor) -> str:
    if value.dim() == 0:
        return f"{value.item():.6g}"
    return f"at most {value.abs().max().item():.6g}, with the norm {value.norm().item():.6g}"
