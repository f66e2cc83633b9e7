"""The arguments of `fit`: a request, and the trainer to use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_core.config.model import ModelConfig
from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.config.trainer import TrainerSettings
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.store.object_source import ObjectSource, object_source
from nemo_rl_core.store.source_digest import source_digest
from nemo_rl_core.trainers.loop import RunResult

RunOnArtifacts = Callable[[Mapping[str, Path], Path, Scorer | None], RunResult]
"""Runs a trainer on artifacts by role, in a work folder, with an optional custom scorer.

Roles are `base`, `train`, `validation`, and `reference` where one was given."""


@dataclass(frozen=True)
class FitRequest:
    """The arguments of a call of `fit`; those of `BaseTrainer.fit` have the same meaning.

    Attributes:
        model: A hub name, a folder, or the config of a model.
        row_format: Options of `DataModule.of` for reading `dataset` and `validation`.
        name: Name of the run. An interrupted run of the same name and inputs is continued, a
            finished one is returned; without a name, every call trains again. The source of
            `reward_fn` and of other custom objects is one of the inputs (`object_source`).
        parts: Custom objects that train or sample, by the part that they replace, and a custom loss
            and advantage, by their argument.
        part_sources: Digests of parts before their first training, if they change in it.
        stoppers: Callbacks that may stop the run.
    """

    model: str | Path | ModelConfig
    dataset: Any
    validation: Any = None
    reward_fn: Any = None
    reference: str | Path | ModelConfig | None = None
    name: str | None = None
    reward_weights: Sequence[float] | None = None
    row_format: Mapping[str, Any] = field(default_factory=dict)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    parts: Mapping[str, Any] = field(default_factory=dict)
    part_sources: Mapping[str, ObjectSource] = field(default_factory=dict)
    stoppers: Sequence[Any] = ()

    @property
    def sources(self) -> dict[str, ObjectSource]:
        """Digests of the parts."""
        return {
            name: self.part_sources[name] if name in self.part_sources else object_source(part)
            for name, part in self.parts.items()
        }

    @property
    def reward(self) -> tuple[Any, Any] | None:
        """The reward with its weights; None for the environment of the settings."""
        reward = (self.reward_fn, self.reward_weights)
        return None if reward == (None, None) else reward


@dataclass(frozen=True)
class TrainerForFit:
    """A trainer as `fit` uses it."""

    algorithm: str
    cls: type
    settings: TrainerSettings
    run: RunOnArtifacts

    @property
    def source(self) -> str:
        """Digest of the source code that training runs."""
        return source_digest(self.cls.__module__)


def reward_name(reward: Any) -> str:
    """Returns the name of a reward in records: a function's name or an object's class."""
    if isinstance(reward, list | tuple):
        return ", ".join(reward_name(each) for each in reward)
    return str(getattr(reward, "__qualname__", type(reward).__qualname__))
