"""What an environment makes of a whole batch of rollouts: adapted rewards, and metrics."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl_core.environments.interfaces import shorten
from nemo_rl_core.errors import NemoRLError, RewardError

HOOK = "global_post_process_and_metrics"


def post_process(environment: Any, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """Calls `global_post_process_and_metrics` on a copy of a batch, and checks what it returns.

    Args:
        environment: An environment; one without the method changes nothing and has no metrics.
        batch: Columns of `B` rows, among them `rewards [B]`.

    Returns:
        `[B]` rewards, and the metrics.

    Raises:
        RewardError: If the method raises, returns no batch and metrics, changes a column besides
            `rewards` (nobody would read it), or returns a number that is not finite.
    """
    hook = getattr(environment, HOOK, None)
    if hook is None:
        return batch["rewards"], {}
    try:
        returned, metrics = hook(_copy(batch))
        columns, found = dict(returned), dict(metrics)
    except NemoRLError:
        raise
    # Named fault boundary: an environment is a user's, and may raise or return anything.
    except Exception as error:
        raise _refused(
            environment,
            expected="(batch, metrics): the columns that it was given, and a dict of numbers",
            got=f"{type(error).__name__}: {shorten(str(error))}",
        ) from error
    changed = [
        name
        for name, column in batch.items()
        if name != "rewards" and not _is_equal(column, columns.get(name))
    ]
    if changed:
        raise _refused(
            environment,
            expected="a change of `rewards` alone; no other column is read again",
            got=f"other {', '.join(changed)}",
        )
    rewards = _checked_rewards(environment, columns.get("rewards"), like=batch["rewards"])
    return rewards, {str(name): _checked(environment, name, each) for name, each in found.items()}


def _checked_rewards(environment: Any, rewards: Any, *, like: Tensor) -> Tensor:
    whole = None
    if isinstance(rewards, Tensor) and rewards.shape == like.shape:
        whole = rewards.detach().to(like)  # a number beyond its range becomes infinite
    if whole is None or not whole.isfinite().all():
        raise _refused(
            environment,
            expected=f"{len(like)} finite rewards in a tensor",
            got=shorten(repr(rewards)),
        )
    return whole


def _checked(environment: Any, name: Any, value: Any) -> float:
    if getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise _refused(
            environment,
            expected="finite numbers as metrics; one that has no value left out",
            got=f"{name} = {shorten(repr(value))}",
        )
    return float(value)


def _copy(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: column.clone() if isinstance(column, Tensor) else list(column)
        for name, column in batch.items()
    }


def _is_equal(column: Any, returned: Any) -> bool:
    if not isinstance(column, Tensor):
        return bool(column == returned)
    if not isinstance(returned, Tensor) or returned.shape != column.shape:
        return False
    return torch.equal(returned.nan_to_num(), column.nan_to_num())


def _refused(environment: Any, *, expected: str, got: str) -> RewardError:
    return RewardError(
        f"{HOOK} of the environment {type(environment).__name__!r} failed",
        expected=expected,
        got=got,
        fix="mend the method, or let it return (batch, {})",
    )
