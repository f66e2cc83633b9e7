"""A limit of GPU-hours of a run: the stage that reaches it saves, and ends the run.

The limit changes no result, so no stage reads it and it is part of no key. On one machine, the
stages of a run share a process, which counts. On a cluster, every attempt of a stage notes on the
shared volume what it uses, lost ones and those of other stages included; of an ancestor that the
execution has made and the volume does not know, the manifest says it.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.errors import ConfigError, ResourceError
from nemo_rl_core.store.ancestry import ancestry_of
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.stage_run import StageRun
from nemo_rl_core.telemetry.gpu_seconds import AttemptRecord

LIMIT = "NEMO_RL_MAX_GPU_HOURS"
"""The variable with the limit."""


@dataclass
class RunSpending:
    """What the stages of a run on one machine have used.

    Attributes:
        gpu_seconds: Of those that have ended.
        max_gpu_hours: The limit of its recipe; None without one.
    """

    gpu_seconds: float = 0.0
    max_gpu_hours: float | None = None


@dataclass
class StageBudget:
    """What a stage may still use.

    Attributes:
        limit_seconds: GPU-seconds of the run.
        earlier_seconds: GPU-seconds that it used outside of this attempt of the stage.
        num_gpus: How many the stage holds.
        began: By `time.monotonic`.
    """

    limit_seconds: float
    earlier_seconds: float
    num_gpus: int
    began: float

    @property
    def own_seconds(self) -> float:
        """GPU-seconds of this attempt of the stage up to now."""
        return self.num_gpus * (time.monotonic() - self.began)

    @property
    def spent_seconds(self) -> float:
        """GPU-seconds of the run up to now."""
        return self.earlier_seconds + self.own_seconds

    @property
    def is_spent(self) -> bool:
        """Whether the run has reached its limit."""
        return self.spent_seconds >= self.limit_seconds

    def error(self, *, step: int | None = None) -> ResourceError:
        """What ends the run.

        Args:
            step: The step that was saved; None before the first.
        """
        then = "starts" if step is None else f"goes on from step {step}"
        return ResourceError(
            "the run has used its GPU-hours",
            expected=f"at most {self.limit_seconds / 3600:.4g} GPU-hours ({LIMIT}, or "
            "budget.max_gpu_hours of the recipe)",
            got=f"{self.spent_seconds / 3600:.4g} on {self.num_gpus} GPUs",
            fix=f"raise it and start the same command again: the stage {then}",
        )


_spending: ContextVar[RunSpending | None] = ContextVar("spending", default=None)
_current: ContextVar[StageBudget | None] = ContextVar("stage_budget", default=None)


@contextmanager
def counted_run(max_gpu_hours: float | None = None) -> Iterator[RunSpending]:
    """Within it, stages of this process count as one run.

    Args:
        max_gpu_hours: Its limit, where `NEMO_RL_MAX_GPU_HOURS` says no other.
    """
    spending = RunSpending(max_gpu_hours=max_gpu_hours)
    token = _spending.set(spending)
    try:
        yield spending
    finally:
        _spending.reset(token)


@contextmanager
def stage_budget(
    num_gpus: int, parents: Iterable[Path], run: StageRun | None
) -> Iterator[StageBudget | None]:
    """Within it, a stage's loop ends when the run has reached its limit.

    Args:
        num_gpus: How many the stage holds; one without GPUs has no limit.
        parents: Folders of the artifacts that it reads.
        run: The execution on a cluster; None on one machine.

    Raises:
        ResourceError: If the limit was reached before.
    """
    limit, began = limit_from(os.environ.get(LIMIT)), time.monotonic()
    spending = _spending.get()
    if limit is None and spending is not None:
        limit = spending.max_gpu_hours
    if limit is None or not num_gpus:
        yield None
        return
    budget = StageBudget(3600 * limit, spending.gpu_seconds if spending else 0.0, num_gpus, began)
    with ExitStack() as stack:
        if run is not None:
            stack.enter_context(_counted_attempt(budget, parents, run))
        if budget.is_spent:
            raise budget.error()
        token = _current.set(budget)
        stack.callback(_current.reset, token)
        try:
            yield budget
        finally:
            if spending is not None:
                spending.gpu_seconds = budget.spent_seconds


@contextmanager
def _counted_attempt(budget: StageBudget, parents: Iterable[Path], run: StageRun) -> Iterator[None]:
    """Within it, the volume knows what the attempt uses, and the attempt what all others do."""
    record, ancestors = AttemptRecord(run), _of_execution(parents, run.execution)

    def note() -> None:
        budget.earlier_seconds = sum((ancestors | record.of_others()).values())
        record.note(budget.own_seconds)

    with record.kept(note):
        yield


def current_budget() -> StageBudget | None:
    """The budget of the stage that runs; None without a limit."""
    return _current.get()


def limit_from(text: str | None) -> float | None:
    """The limit that the variable's text says, in GPU-hours; None for no text.

    Raises:
        ConfigError: If it is no positive number.
    """
    if not text:
        return None
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 < hours < float("inf"):
        raise ConfigError(
            f"{LIMIT} is no number of GPU-hours",
            expected="a positive number, such as 12.5",
            got=text,
            fix=f"correct {LIMIT}, or unset it",
        )
    return hours


def _of_execution(parents: Iterable[Path], execution: str) -> dict[StageRun, float]:
    """GPU-seconds of the attempts of an execution whose artifacts led to a stage."""
    made: dict[StageRun, float] = {}
    for folder in parents:
        for manifest in (Manifest.read(folder), *(each.manifest for each in ancestry_of(folder))):
            if manifest is not None and manifest.run and manifest.run.execution == execution:
                made[manifest.run] = manifest.cost.gpu_seconds
    return made
