"""Post-processing of a full batch of rollouts by an environment: adapted rewards and metrics."""

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

    Returns:
        `[B]` rewards, and the metrics; the unchanged rewards and no metrics without the method.

    Raises:
        RewardError: If the method raises, does not return a batch and metrics, changes a column
            other than `rewards` (it would be ignored), or returns a number that is not finite.
    """
    hook = getattr(environment, HOOK, None)
    if hook is None:
        return batch["rewards"], {}
    try:
        returned, metrics = hook(_copy(batch))
        columns, numbers_by_name = dict(returned), dict(metrics)
    except NemoRLError:
        raise
    # Broad on purpose: a user-defined environment may raise or return anything.
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
            expected="changes only in `rewards`, since no other column is read again",
            got=f"changed columns: {', '.join(changed)}",
        )
    rewards = _checked_rewards(environment, columns.get("rewards"), like=batch["rewards"])
    return rewards, {
        str(name): _checked(environment, name, value) for name, value in numbers_by_name.items()
    }


def _checked_rewards(environment: Any, rewards: Any, *, like: Tensor) -> Tensor:
    converted = None
    if isinstance(rewards, Tensor) and rewards.shape == like.shape:
        converted = rewards.detach().to(like)  # a number beyond its range becomes infinite
    if converted is None or not converted.isfinite().all():
        raise _refused(
            environment,
            expected=f"{len(like)} finite rewards in a tensor",
            got=shorten(repr(rewards)),
        )
    return converted


def _checked(environment: Any, name: Any, value: Any) -> float:
    if getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise _refused(
            environment,
            expected="finite numbers as metrics; leave out a metric that has no value",
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
        fix="fix the method, or have it return (batch, {})",
    )
