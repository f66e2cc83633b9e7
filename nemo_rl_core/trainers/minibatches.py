"""Several optimizer steps on the rollouts of one step."""

from collections.abc import Sequence

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.interfaces import PolicyInterface

_STEP_METRICS = frozenset({"grad_norm", "learning_rate"})
"""Figures of an optimizer step as such, each of which counts once."""


def train_in_parts(
    policy: PolicyInterface,
    batch: BatchedDataDict,
    loss_fn: LossFunction,
    *,
    size: int | None,
    sequence_means: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """One optimizer step on each of consecutive parts of the batch.

    Rollouts that could not be scored may leave fewer rows than were asked for. There are then as
    many parts as come nearest to `size` rows each, and their sizes differ by at most one: a part of
    a few rows would make a whole optimizer step of their noise. Every row is in exactly one part.

    Args:
        policy: What is trained.
        batch: `B` rows.
        loss_fn: The loss.
        size: Rows a part; None takes all at once.
        sequence_means: The metrics of the loss that are means over sequences, not over tokens.

    Returns:
        The parts' metrics as `combined` has them.
    """
    parts, num_sequences, start = [], [], 0
    for rows in _part_sizes(batch.size, size):
        part = batch.slice(start, start + rows)
        parts.append(policy.train(part, loss_fn))
        num_sequences.append(float(part["sample_mask"].sum()))
        start += rows
    by_sequence = _means(parts, num_sequences)
    means = combined(parts)
    return {
        name: by_sequence[name] if name in sequence_means else mean for name, mean in means.items()
    }


def combined(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of several optimizer steps as if they were one.

    A metric is a mean over tokens, so that each step counts by its `num_valid_tokens`, which are
    summed; `grad_norm` and `learning_rate` are means over the steps.
    """
    num_tokens = [part["num_valid_tokens"] for part in parts]
    by_token, by_step = _means(parts, num_tokens), _means(parts, [1.0] * len(parts))
    means = {name: (by_step if name in _STEP_METRICS else by_token)[name] for name in by_step}
    return {**means, "num_valid_tokens": sum(num_tokens)}


def _part_sizes(num_rows: int, size: int | None) -> list[int]:
    num_parts = 1 if size is None else max((2 * num_rows + size) // (2 * size), 1)
    least, longer = divmod(num_rows, num_parts)
    return [least + 1] * longer + [least] * (num_parts - longer)


def _means(parts: Sequence[dict[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Weighted means; 0 where nothing has a weight, as the mean of no tokens is in a loss."""
    total = sum(weights) or 1.0
    return {
        name: sum(weight * part[name] for part, weight in zip(parts, weights, strict=True)) / total
        for name in parts[0]
    }
