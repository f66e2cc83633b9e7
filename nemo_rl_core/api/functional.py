"""Algorithms by name."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nemo_rl_core.algorithms.declarations import ALGORITHMS
from nemo_rl_core.algorithms.grpo.presets import PRESETS
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.registry import Registry
from nemo_rl_core.trainers.base import BaseTrainer

_ALGORITHM_REGISTRY: Registry[BaseTrainer[Any, Any]] = Registry(
    "algorithm",
    {
        **{
            name: f"nemo_rl_core.algorithms.{name}.trainer:{algorithm.trainer}"
            for name, algorithm in ALGORITHMS.items()
        },
        "async_grpo": "nemo_rl_core.algorithms.grpo.asynchronous:AsyncGRPOTrainer",
    },
)
register_algorithm = _ALGORITHM_REGISTRY.register
"""Decorator that registers a trainer class under a name."""
get_algorithm = _ALGORITHM_REGISTRY.get
"""Returns the trainer class of a name; raises `ConfigError` with the choices if unknown."""

_WRITE_INSTEAD = {
    **{
        name: f'algorithm="dpo", loss={{"kind": "{name}"}}'
        for name in ("ipo", "kto", "orpo", "simpo", "hinge", "robust")
    },
    "reward": 'algorithm="reward_model"',
    "rm": 'algorithm="reward_model"',
    "gkd": 'algorithm="distillation"',
    "reinforce++": 'algorithm="reinforce_plus_plus"',
}
"""Replacements for names of variants and for other names of algorithms."""


class NamedAlgorithm(NamedTuple):
    """A trainer, and settings by name including those of the preset."""

    trainer: type[BaseTrainer[Any, Any]]
    overrides: dict[str, Any]


def algorithm_named(name: str, overrides: Mapping[str, Any]) -> NamedAlgorithm:
    """Looks up an algorithm or a preset of GRPO by name, in lower or upper case.

    An error for an unknown name has the line to write if the intent is clear.
    """
    plain = name.lower().replace("-", "_")
    if _ALGORITHM_REGISTRY.reference(name) is None and plain != name:
        return algorithm_named(plain, overrides)
    if _ALGORITHM_REGISTRY.reference(name) is None and name in PRESETS:
        if "preset" in overrides:
            raise ConfigError(
                f"the algorithm {name!r} is a preset of GRPO, but preset is also given",
                got=f"algorithm={name!r}, preset={overrides['preset']!r}",
                fix=f"leave preset out, or write algorithm='grpo', preset={overrides['preset']!r}",
            )
        return NamedAlgorithm(get_algorithm("grpo"), {**overrides, "preset": name})
    try:
        return NamedAlgorithm(get_algorithm(name), dict(overrides))
    except ConfigError as error:
        line = _WRITE_INSTEAD.get(name)
        if line is None:
            raise
        raise ConfigError(
            error.problem, expected=error.expected, got=error.got, fix=f"write {line}"
        ) from None
