"""Hooks into a trainer's loop."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from nemo_rl_core.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl_core.config.trainer import LoopConfig, TrainerSettings
    from nemo_rl_core.models.interfaces import PolicyInterface
    from nemo_rl_core.telemetry.usage import Timer

logger = logging.getLogger(__name__)
Metrics = Mapping[str, float]


class RunningTrainer(Protocol):
    """The attributes of every trainer that hooks may read; subclasses have more."""

    algorithm: ClassVar[str]
    step: int
    timer: "Timer"

    @property
    def settings(self) -> "TrainerSettings":
        """All settings of the trainer."""
        ...

    @property
    def config(self) -> "LoopConfig":
        """The algorithm's section of the settings."""
        ...

    @property
    def policy(self) -> "PolicyInterface":
        """The model in training."""
        ...

    @property
    def history(self) -> Sequence[Metrics]:
        """Metrics of all finished steps, including those before a resume."""
        ...

    def stop(self, reason: str) -> None:
        """Ends the run after this step: it is saved, and its model is the result."""
        ...


class Callback:
    """Base of callbacks; every hook does nothing until overridden.

    Hooks may read the trainer. `trainer.stop(reason)` ends the run after the step, with a
    checkpoint and a result; an exception ends it as failed. After a resume, hooks are called for
    the steps that are run again, but not for steps that an earlier attempt saved.

    Attributes:
        stops: Whether hooks may call `trainer.stop`. The source and the fields of such a callback
            are then part of the key of a named run.

    Example:
        >>> class PrintLoss(Callback):
        ...     def on_step_end(self, trainer, step, metrics):
        ...         print(f"step {step}: {metrics['loss']:.4f}")
    """

    stops: ClassVar[bool] = False

    def on_fit_begin(self, trainer: RunningTrainer) -> None:
        """Called when workers are ready, before the first step."""

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """Called after the last step is saved; workers still run."""

    def on_epoch_begin(self, trainer: RunningTrainer, epoch: int) -> None:
        """Called before the first step of pass `epoch` (from 0) over the data."""

    def on_epoch_end(self, trainer: RunningTrainer, epoch: int, metrics: Metrics) -> None:
        """Called after the last step of the pass or run, with that step's `metrics`."""

    def on_step_begin(self, trainer: RunningTrainer, step: int) -> None:
        """Called before each step; `step` counts from 1 over the full run."""

    def on_step_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        """Called after the optimizer step."""

    def on_validation_begin(self, trainer: RunningTrainer, step: int) -> None:
        """Called before validation after step `step`."""

    def on_validation_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        """Called after validation; names of metrics begin with `validation_`."""

    def on_save(self, trainer: RunningTrainer, step: int, checkpoint: Path) -> None:
        """Called when a complete checkpoint with `model/` is on disk.

        Without a callback that has this hook, checkpoints during a run have no `model/`.
        """


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Stops a run once a metric has not improved for `patience` values in a row.

    Validation metrics have values only in steps that validate.

    Attributes:
        metric: Name of the metric, such as `validation_mean_reward` or `validation_loss`.
        mode: Whether the metric is better when it is higher (`max`) or lower (`min`).
        patience: Number of values without an improvement.
        min_change: Smallest difference from the best value that counts as an improvement.

    Example:
        >>> stopping = EarlyStopping("validation_loss", mode="min", patience=2)
        >>> stopping.values_since_best([0.9, 0.5, 0.6, 0.5])
        2
    """

    metric: str
    mode: Literal["max", "min"] = "max"
    patience: int = 3
    min_change: float = 0.0
    stops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuses invalid arguments."""
        if self.mode not in ("max", "min") or self.patience < 1 or self.min_change < 0:
            raise ConfigError(
                "EarlyStopping cannot work with these arguments",
                expected="mode 'max' or 'min', patience of 1 or more, min_change of 0 or more",
                got=repr(self),
            )

    def on_step_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        """Stops the run if the metric has a new value and has not improved for long enough."""
        if self.metric not in metrics:
            return
        values = [each[self.metric] for each in trainer.history if self.metric in each]
        if self.values_since_best(values) >= self.patience:
            best = (max if self.mode == "max" else min)(values)
            trainer.stop(f"{self.metric} has not improved on {best:.6g} for {self.patience} values")

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """Warns if no step had the metric."""
        if not any(self.metric in each for each in trainer.history):
            names = sorted({name for each in trainer.history for name in each})
            logger.warning(
                "EarlyStopping: no step has the metric %r; steps have %s",
                self.metric,
                ", ".join(names),
            )

    def values_since_best(self, values: Sequence[float]) -> int:
        """Returns the number of values since the last improvement."""
        sign = 1.0 if self.mode == "max" else -1.0
        best, num_since = -math.inf, 0
        for value in values:
            is_better = sign * value > best + self.min_change
            best, num_since = (sign * value, 0) if is_better else (best, num_since + 1)
        return num_since


class Callbacks:
    """A trainer's callbacks, called in order; each must be an instance of `Callback`."""

    def __init__(self, trainer: RunningTrainer, callbacks: Iterable[Callback]) -> None:
        self._trainer = trainer
        self._callbacks = tuple(callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks must be instances of Callback, got {callback!r}")

    def handles(self, hook: str) -> bool:
        """Whether any callback overrides the hook."""
        default = getattr(Callback, hook)
        hooks = (getattr(each, hook) for each in self._callbacks)
        return any(getattr(each, "__func__", each) is not default for each in hooks)

    @property
    def may_stop(self) -> bool:
        """Whether any callback may stop the run."""
        return any(each.stops for each in self._callbacks)

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls the named hook of every callback."""
        for callback in self._callbacks:
            getattr(callback, hook)(self._trainer, *arguments)
