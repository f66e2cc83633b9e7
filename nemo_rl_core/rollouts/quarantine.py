"""Rollouts that could not be scored: set aside and counted, never taken for bad ones."""

from collections.abc import Sequence

from nemo_rl_core.environments.interfaces import shorten
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

_NUM_SHOWN = 2
_MAX_CHARACTERS = 260  # room for the prompt, the completion, the error and its place


def valid_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those without an error, in order: what is trained on."""
    return [rollout for rollout in rollouts if rollout.error is None]


def failure_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """`num_failed_rollouts` and `failed_fraction` of at least one rollout."""
    num_failed = len(rollouts) - len(valid_rollouts(rollouts))
    return {
        "num_failed_rollouts": float(num_failed),
        "failed_fraction": num_failed / len(rollouts),
    }


def refuse_too_many_failures(rollouts: Sequence[Rollout], *, max_failed_fraction: float) -> None:
    """Stops where so many could not be scored that the environment itself must be at fault.

    Args:
        rollouts: All that were scored at once.
        max_failed_fraction: The largest share of failures that is accepted; that nothing at all is
            left never is.

    Raises:
        RewardError: Past that share; with the first errors.
    """
    errors = [rollout.error for rollout in rollouts if rollout.error is not None]
    num_failed, total = len(errors), len(rollouts)
    if num_failed <= max_failed_fraction * total and not 0 < num_failed == total:
        return
    first = [shorten(each, _MAX_CHARACTERS) for each in dict.fromkeys(errors)][:_NUM_SHOWN]
    raise RewardError(
        f"{num_failed} of {total} rollouts could not be scored",
        expected=f"at most {max_failed_fraction:.0%} of them (max_failed_fraction)"
        if num_failed < total
        else "a reward for at least one",
        got="; ".join(first),
        fix="mend the environment or these rows, or raise rollouts.max_failed_fraction",
    )
