"""A check of a loss against finite differences, on a small batch of every column."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.errors import ConfigError, MissingColumnError
from nemo_rl_core.functional.custom_loss import (
    CheckedLoss,
    halves,
    refuse_micro_batch_dependence,
    with_gradient,
)
from nemo_rl_core.functional.masked import valid_token_mask
from nemo_rl_core.functional.protocols import LossFunction

_STEP: Final = 1e-6
_DETACHING: Final = (
    *(Tensor.detach, Tensor.detach_, Tensor.data.__get__),  # type: ignore[attr-defined]
    *(Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__),
)
_ROLLOUT: Final = (
    *("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs"),
    *("rewards", "group_ids", "truncated", "rollout_lengths"),
)
COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "sft": (),
    "dpo": ("is_chosen", "pair_ids", "reference_logprobs"),
    "grpo": (*_ROLLOUT, "outcomes"),
    "ppo": (*_ROLLOUT, "old_values", "returns"),
}
"""Columns of a batch by algorithm, besides ids, lengths and masks. `reference_logprobs` are there
if the settings have a reference, `truncated` and the rest of rollouts always."""


def example_batch(algorithm: str, *, seed: int = 0) -> dict[str, Tensor]:
    """Returns a batch of four sequences, in float64, with the columns of an algorithm.

    One sequence is masked, except for `dpo`, and one is shorter than the others.
    """
    if algorithm not in COLUMNS:
        raise unknown_names(
            "a custom loss does not exist for the algorithm",
            [algorithm],
            list(COLUMNS),
            otherwise="choose one",
        )
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_tokens = 4, 6

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def logprobs() -> Tensor:
        return -normal(num_rows, num_tokens - 1).abs() - 0.1

    lengths = torch.tensor([6, 5, 6, 6])
    position = torch.arange(1, num_tokens)
    token_mask = (position >= 2) & (position < lengths[:, None])
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0], dtype=torch.float64)
    columns = {
        "advantages": normal(num_rows, num_tokens - 1),
        "prev_logprobs": logprobs(),
        "generation_logprobs": logprobs(),
        "reference_logprobs": logprobs(),
        "rewards": rewards,
        "outcomes": rewards,
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "truncated": torch.tensor([False, False, True, False]),
        "rollout_lengths": lengths - 2,
        "is_chosen": torch.tensor([True, False, True, False]),
        "pair_ids": torch.tensor([0, 0, 1, 1]),
        "old_values": normal(num_rows, num_tokens - 1),
        "returns": normal(num_rows, num_tokens - 1),
    }
    is_valid = [1.0, 1.0, 1.0, 1.0 if algorithm == "dpo" else 0.0]
    return {
        "input_ids": torch.randint(3, 20, (num_rows, num_tokens), generator=generator),
        "input_lengths": lengths,
        "token_mask": token_mask,
        "sample_mask": torch.tensor(is_valid, dtype=torch.float64),
        **{name: columns[name] for name in COLUMNS[algorithm]},
    }


def check_loss(
    loss_fn: LossFunction,
    algorithm: str = "grpo",
    *,
    batch: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-5,
) -> Tensor:
    """Checks a loss on one batch, without a model.

    The result must be a finite loss with metrics, its gradient must equal finite differences, be 0
    at masked tokens, which may be NaN, and two micro-batches must add up to one. Detached values
    count as constants.

    Args:
        loss_fn: The loss; see `LossFunction`.
        algorithm: The algorithm whose columns the batch has: `grpo`, `dpo`, `sft` or `ppo`.
        batch: Columns in float64 with at least two sequences, or pairs; None takes `example_batch`.
        tolerance: Largest difference, relative to the largest gradient.

    Returns:
        `[B, T-1]`, the gradient with respect to the logprobs of the next tokens.

    Raises:
        ConfigError: For the first check that fails, with the fix.

    Example:
        >>> from nemo_rl_core.algorithms.sft.loss import NLLLoss
        >>> check_loss(NLLLoss(), "sft")[0, 1:]  # there are 11 valid tokens
        tensor([-0.0909, -0.0909, -0.0909, -0.0909], dtype=torch.float64)
    """
    batch = example_batch(algorithm) if batch is None else batch
    batch = _Columns(batch) if isinstance(batch, dict) else batch
    name = str(getattr(loss_fn, "__name__", type(loss_fn).__name__))
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    counts = {"global_valid_seqs": batch["sample_mask"].double().sum()}
    counts["global_valid_tokens"] = mask.double().sum()
    generator = torch.Generator().manual_seed(1)
    logprobs = -torch.rand(mask.shape, generator=generator, dtype=torch.float64) - 0.1
    if len(halves(batch, len(logprobs), logprobs.device)) < 2:
        raise ConfigError(
            "a batch of one sequence, or of one pair, cannot be split into micro-batches",
            expected="at least two",
            got="1",
            fix="add rows, with another number in pair_ids for pairs",
        )
    checked = CheckedLoss(fn=loss_fn, name=name, is_first_step=False)

    def call(values: Tensor, rows: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        return checked(values, rows, **counts)

    gradient = refuse_micro_batch_dependence(call, logprobs, batch, name=name, tolerance=tolerance)
    try:
        with_gradient(call, torch.where(mask, logprobs, torch.nan), batch, name=name)
    except ConfigError as error:
        raise ConfigError(
            f"the loss {name} reads masked tokens",
            expected="a finite loss if logprobs are NaN at masked tokens",
            got=error.got,
            fix="apply zero_masked(values, mask) to the logprobs; a product with a mask keeps NaN",
        ) from error
    differences = _finite_differences(lambda values: call(values, batch)[0], logprobs, mask)
    scale = gradient.abs().max().clamp(min=1e-12)
    wrong = ((gradient - differences).abs() > tolerance * scale).nonzero().tolist()
    if wrong:
        row, position = wrong[0]
        raise ConfigError(
            f"the gradient of the loss {name} is not that of its values",
            expected=f"{differences[row, position].item():.6g} at row {row}, position {position}, "
            "by finite differences",
            got=f"{gradient[row, position].item():.6g}",
            fix="use torch's functions of tensors throughout; a custom autograd.Function needs the "
            "derivative of its forward",
        )
    return gradient


def _finite_differences(
    loss_of: Callable[[Tensor], Tensor], logprobs: Tensor, mask: Tensor
) -> Tensor:
    """Returns `[B, T-1]` central differences, in which detached values do not change."""
    with _Constants() as constants:
        loss_of(logprobs.clone().requires_grad_())
    result = torch.zeros_like(logprobs)
    for index in mask.nonzero().tolist():
        values = []
        for step in (_STEP, -_STEP):
            moved = logprobs.clone()
            moved[tuple(index)] += step
            with _Constants(constants.values):
                values.append(loss_of(moved.requires_grad_()))
        result[tuple(index)] = (values[0] - values[1]).detach() / (2 * _STEP)
    return result


class _Columns(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise MissingColumnError(
            f"the batch has no column {name!r}",
            got=f"the columns {', '.join(sorted(self))}",
            fix="add it to the batch",
        )


class _Constants(TorchFunctionMode):
    """Records the values that have no gradient, such as those of `detach`, or returns them again.

    Args:
        recorded: Values of an earlier call to return; None records.
    """

    def __init__(self, recorded: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.values: list[Any] = []
        self._recorded = iter(recorded) if recorded is not None else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], Tensor) else None
        version = None if target is None else target._version
        computed = func(*args, **(kwargs or {}))
        if func not in _DETACHING and torch.is_grad_enabled():
            return computed
        if self._recorded is None:
            self.values.append(_copied(computed))
            return computed
        recorded = next(self._recorded)
        if not isinstance(computed, Tensor) or computed.shape != recorded.shape:
            return _copied(recorded)
        if computed is target and (func is Tensor.detach_ or target._version != version):
            with torch.no_grad():
                return target.copy_(recorded)
        # A view of a constant stays a view, for changes in place.
        return computed if torch.equal(computed, recorded) else _copied(recorded)


def _copied(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)([_copied(each) for each in value])
    return value.clone() if isinstance(value, Tensor) else value
