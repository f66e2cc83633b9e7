"""Default warm-up by number of steps, and warnings for warm-ups longer than the run."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

_MAX_STEPS: Final = 10
_SHARE: Final = 4
"""The default warm-up is at most this fraction (1 / _SHARE) of the steps."""


def default_warm_up(section: Mapping[str, Any]) -> int:
    """Returns the warm-up steps of a pretrained model: 10, or a quarter of the run if that is less.

    Example:
        >>> default_warm_up({"num_steps": 12}), default_warm_up({"num_steps": 3})
        (3, 0)
    """
    steps = section.get("num_steps", section.get("num_steps_per_iteration"))
    iterations = section.get("num_iterations", 1)
    if not isinstance(steps, int) or not isinstance(iterations, int):
        return _MAX_STEPS
    return min(_MAX_STEPS, steps * iterations // _SHARE)


def warm_up_warnings(section: str, config: Any) -> Iterator[str]:
    """Yields a sentence for each warm-up that is longer than the run."""
    steps = getattr(config, "num_steps", None) or getattr(config, "num_steps_per_iteration", None)
    if steps is None:
        return  # a section of a custom trainer
    steps *= getattr(config, "num_iterations", 1)
    batch = getattr(config, "train_global_batch_size", None)
    sequences = getattr(config, "num_sequences_per_step", batch)
    updates = steps * (sequences // batch if batch else 1)
    updates *= getattr(config, "num_epochs_per_rollout", 1)
    parts = {section: config}
    if (critic := getattr(config, "critic", None)) is not None:
        parts[f"{section}.critic"] = critic
    for path, part in parts.items():
        warm_up = getattr(part, "num_warmup_steps", 0)
        if warm_up > updates:
            yield (
                f"{path}.num_warmup_steps is {warm_up}, but the run has {updates} optimizer "
                f"steps: the learning rate ends at {part.learning_rate * updates / warm_up:.3g} "
                f"and never reaches {part.learning_rate:.3g}"
            )
    critic_steps = getattr(config, "num_critic_warmup_steps", 0)
    if critic_steps >= steps:
        yield (
            f"{section}.num_critic_warmup_steps is {critic_steps}, but the run has {steps} "
            "steps: the policy is never trained"
        )
