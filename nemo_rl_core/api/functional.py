"""Algorithms by name."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nemo_rl_core.algorithms.grpo.presets import PRESETS
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.registry import Registry
from nemo_rl_core.trainers.base import BaseTrainer

_ALGORITHM_REGISTRY: Registry[BaseTrainer[Any, Any]] = Registry(
    "algorithm",
    {
        "sft": "nemo_rl_core.algorithms.sft.trainer:SFTTrainer",
        "dpo": "nemo_rl_core.algorithms.dpo.trainer:DPOTrainer",
        "reward_model": "nemo_rl_core.algorithms.reward_model.trainer:RewardModelTrainer",
        "grpo": "nemo_rl_core.algorithms.grpo.trainer:GRPOTrainer",
        "async_grpo": "nemo_rl_core.algorithms.grpo.asynchronous:AsyncGRPOTrainer",
        "ppo": "nemo_rl_core.algorithms.ppo.trainer:PPOTrainer",
        "distillation": "nemo_rl_core.algorithms.distillation.trainer:DistillationTrainer",
    },
)
register_algorithm = _ALGORITHM_REGISTRY.register
"""Registers a trainer class under a name: a decorator."""
get_algorithm = _ALGORITHM_REGISTRY.get
"""The trainer class of a name; an unknown name raises `ConfigError` with the choices."""

_LINES = {
    **{
        name: f'algorithm="dpo", loss={{"kind": "{name}"}}'
        for name in ("ipo", "kto", "orpo", "simpo", "hinge", "robust")
    },
    "reward": 'algorithm="reward_model"',
    "rm": 'algorithm="reward_model"',
    "gkd": 'algorithm="distillation"',
    "reinforce++": 'algorithm="reinforce_plus_plus"',
}
"""What to write for an algorithm that is a variant of another, or has another name."""


class NamedAlgorithm(NamedTuple):
    """A trainer, and the settings by name that its name stands for with those that were given."""

    trainer: type[BaseTrainer[Any, Any]]
    overrides: dict[str, Any]


def algorithm_named(name: str, overrides: Mapping[str, Any]) -> NamedAlgorithm:
    """The algorithm that a user names: any case, and presets of GRPO by their own names.

    Args:
        name: Such as `sft`, `GRPO` or `rloo`.
        overrides: Settings by name.

    Raises:
        ConfigError: If there is none, with the line to write where another name is clearly meant.
    """
    plain = name.lower().replace("-", "_")
    if _ALGORITHM_REGISTRY.reference(name) is None and plain != name:
        return algorithm_named(plain, overrides)
    if _ALGORITHM_REGISTRY.reference(name) is None and name in PRESETS:
        if "preset" in overrides:
            raise ConfigError(
                f"the algorithm {name!r} is a preset of GRPO, and preset is given too",
                got=f"algorithm={name!r}, preset={overrides['preset']!r}",
                fix=f"leave preset out, or write algorithm='grpo', preset={overrides['preset']!r}",
            )
        return NamedAlgorithm(get_algorithm("grpo"), {**overrides, "preset": name})
    try:
        return NamedAlgorithm(get_algorithm(name), dict(overrides))
    except ConfigError as error:
        line = _LINES.get(name)
        if line is None:
            raise
        raise ConfigError(
            error.problem, expected=error.expected, got=error.got, fix=f"write {line}"
        ) from None
