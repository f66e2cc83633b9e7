"""Hooks into a trainer's loop."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from nemo_rl_core.config.trainer import LoopConfig, TrainerSettings
    from nemo_rl_core.models.interfaces import PolicyInterface
    from nemo_rl_core.telemetry.timer import Timer

Metrics = Mapping[str, float]


class RunningTrainer(Protocol):
    """What hooks can read of every trainer; that of an algorithm has more.

    Attributes:
        algorithm: The algorithm's name, and that of its section.
        policy: The model in training.
        step: The number of the step that goes on, counted from 1.
        timer: Measures the phases of that step.
    """

    algorithm: ClassVar[str]
    step: int
    timer: "Timer"

    @property
    def settings(self) -> "TrainerSettings":
        """All that the trainer was told."""
        ...

    @property
    def config(self) -> "LoopConfig":
        """The algorithm's section of the settings."""
        ...

    @property
    def policy(self) -> "PolicyInterface":
        """The model in training."""
        ...


class Callback:
    """Does nothing; override the hooks that you want.

    A hook may read the trainer and may raise to stop the run. After a resume, hooks are called for
    the steps that are run again, and for no step that an earlier attempt saved.

    Example:
        >>> class PrintLoss(Callback):
        ...     def on_step_end(self, trainer, step, metrics):
        ...         print(f"step {step}: {metrics['loss']:.4f}")
    """

    def on_fit_begin(self, trainer: RunningTrainer) -> None:
        """Workers are ready and no step has been run."""

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """The last step has been saved; workers still run."""

    def on_epoch_begin(self, trainer: RunningTrainer, epoch: int) -> None:
        """The next step takes the first rows of pass `epoch` (from 0) over the data."""

    def on_epoch_end(self, trainer: RunningTrainer, epoch: int, metrics: Metrics) -> None:
        """The last step of the pass has ended, or of the run; `metrics` are that step's."""

    def on_step_begin(self, trainer: RunningTrainer, step: int) -> None:
        """Step `step` begins, counted from 1 over the whole run."""

    def on_step_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        """The optimizer has made its step."""

    def on_validation_begin(self, trainer: RunningTrainer, step: int) -> None:
        """Held-out rows are about to be looked at, after step `step`."""

    def on_validation_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        """They have been; names begin with `validation_`."""

    def on_save(self, trainer: RunningTrainer, step: int, checkpoint: Path) -> None:
        """A checkpoint is on the disk, whole, with `model/`.

        Without a callback that has this hook, checkpoints of a run under way have no `model/`.
        """


class Callbacks:
    """A trainer's callbacks, called in order.

    Args:
        trainer: Given to every hook.
        callbacks: Instances of `Callback`.

    Raises:
        TypeError: If one of them is something else.
    """

    def __init__(self, trainer: RunningTrainer, callbacks: Iterable[Callback]) -> None:
        self._trainer = trainer
        self._callbacks = tuple(callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks must be instances of Callback, got {callback!r}")

    def handles(self, hook: str) -> bool:
        """Whether a callback has a hook of that name of its own."""
        default = getattr(Callback, hook)
        hooks = (getattr(each, hook) for each in self._callbacks)
        return any(getattr(each, "__func__", each) is not default for each in hooks)

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls the hook of that name of each."""
        for callback in self._callbacks:
            getattr(callback, hook)(self._trainer, *arguments)
