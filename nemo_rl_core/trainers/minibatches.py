"""Several optimizer steps on the rollouts of one step."""

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.policy import Policy


def train_in_parts(
    policy: Policy, batch: BatchedDataDict, loss_fn: LossFunction, *, size: int | None
) -> dict[str, float]:
    """One optimizer step on each of consecutive parts of the batch.

    Args:
        policy: What is trained.
        batch: `B` rows.
        loss_fn: The loss.
        size: Rows a part; None takes all at once.

    Returns:
        The means of the parts' metrics; `num_valid_tokens` is their sum.
    """
    rows = size or batch.size
    parts = [
        policy.train(batch.slice(start, start + rows), loss_fn)
        for start in range(0, batch.size, rows)
    ]
    return combined(parts)


def combined(parts: list[dict[str, float]]) -> dict[str, float]:
    """The means of the metrics of several optimizer steps; `num_valid_tokens` is summed."""
    means = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    return {**means, "num_valid_tokens": sum(part["num_valid_tokens"] for part in parts)}
