"""The environment's `global_post_process_and_metrics` on all rollouts of a draw."""

from collections.abc import Sequence
from typing import Any

from nemo_rl_core.environments.post_processing import post_process
from nemo_rl_core.rollouts.batch import rollout_batch
from nemo_rl_core.rollouts.quarantine import valid_rollouts
from nemo_rl_core.types import Rollout


def post_processed(
    environment: Any, rollouts: Sequence[Rollout]
) -> tuple[list[Rollout], dict[str, float]]:
    """The rollouts with the rewards that the environment adapts, and its metrics.

    Args:
        environment: Gets what `rollout_batch` returns of those rollouts that could be scored, and
            as lists `tasks`, `prompts`, `completions` and `answers`.
        rollouts: Scored; those that could not be scored stay as they are.

    Returns:
        All rollouts in their places, and the metrics; none where not one rollout could be scored.

    Raises:
        RewardError: As `post_process`.
    """
    counted = valid_rollouts(rollouts)
    if not counted:
        return list(rollouts), {}
    batch: dict[str, Any] = {
        **rollout_batch(counted),
        "tasks": [each.prompt.task for each in counted],
        "prompts": [each.prompt.text for each in counted],
        "completions": [each.text for each in counted],
        "answers": [each.prompt.answer for each in counted],
    }
    rewards, metrics = post_process(environment, batch)
    # A reward that is not adapted keeps its digits, of which a tensor holds fewer.
    adapted = iter(
        each if same else each.scored(reward)
        for each, same, reward in zip(
            counted, (rewards == batch["rewards"]).tolist(), rewards.tolist(), strict=True
        )
    )
    return [next(adapted) if each.error is None else each for each in rollouts], metrics


def mean_metrics(draws: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """The metrics of a step's draws, each counted by its number of rollouts.

    A metric that only some draws have is a mean over these.
    """
    sums: dict[str, tuple[float, int]] = {}
    for size, metrics in draws:
        for name, value in metrics.items():
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + size * value, count + size
    return {name: total / count for name, (total, count) in sums.items()}
