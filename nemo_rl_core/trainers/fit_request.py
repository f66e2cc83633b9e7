"""What `fit` is asked for: the request, and the trainer that it trains with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_core.config.model import ModelConfig
from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.config.trainer import TrainerSettings
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.store.source_digest import source_digest
from nemo_rl_core.trainers.loop import RunResult

RunOnArtifacts = Callable[[Mapping[str, Path], Path, Scorer | None], RunResult]
"""A trainer's run: of artifacts by role, in a work folder, with a scorer in place of the settings'.

Roles are `base`, `train`, `validation`, and `reference` where one was given."""


@dataclass(frozen=True)
class FitRequest:
    """What `fit` was asked for.

    Attributes:
        model: A hub name, a folder, or the config of a model.
        dataset: Whatever `DataModule.of` reads.
        validation: The same, for rows that are never trained on.
        reward_fn: Whatever `as_scorer` takes, or None for the environment of the settings.
        reference: Hub name or folder of the reference or teacher; None takes `model`.
        row_format: How the columns of both are read, as `DataModule.of` takes it.
        name: Of the run. An interrupted run of the same name and inputs is continued, a finished
            one is given back; without a name, every call trains anew. The source of `reward_fn` and
            of other objects of the user's is one of the inputs (`object_source`).
        reward_weights: Of the functions of a list.
        tracking: Where metrics go besides the run's record.
        parts: Objects of the user's that train or sample, by what they stand for.
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
    stoppers: Sequence[Any] = ()

    @property
    def reward(self) -> tuple[Any, Any] | None:
        """The reward with its weights; None for the environment of the settings."""
        given = (self.reward_fn, self.reward_weights)
        return None if given == (None, None) else given


@dataclass(frozen=True)
class FittedTrainer:
    """The trainer that `fit` trains with.

    Attributes:
        algorithm: Its name, which is the stage's too.
        cls: Its class.
        settings: Its settings.
        run: Trains.
    """

    algorithm: str
    cls: type
    settings: TrainerSettings
    run: RunOnArtifacts

    @property
    def source(self) -> str:
        """Digest of the source that the training runs."""
        return source_digest(self.cls.__module__)


def reward_name(reward: Any) -> str:
    """What a reward is called in records: a function's name, an object's class."""
    if isinstance(reward, list | tuple):
        return ", ".join(reward_name(each) for each in reward)
    return str(getattr(reward, "__qualname__", type(reward).__qualname__))
