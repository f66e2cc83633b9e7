"""A limit of GPU-hours of a run: the stage that reaches it saves, and ends the run.

The limit changes no result, so no stage reads it and it is part of no key. On one machine, the
stages of a run share a process, which counts. On a cluster, a stage counts its ancestors that the
same execution has made, which leaves out lost attempts and an evaluation that nothing depends on.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.errors import ConfigError, ResourceError
from nemo_rl_core.store.ancestry import ancestry_of
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.stage_run import StageRun

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


@dataclass(frozen=True)
class StageBudget:
    """What a stage may still use.

    Attributes:
        limit_seconds: GPU-seconds of the run.
        earlier_seconds: GPU-seconds that it used before the stage.
        num_gpus: How many the stage holds.
        began: By `time.monotonic`.
    """

    limit_seconds: float
    earlier_seconds: float
    num_gpus: int
    began: float

    @property
    def spent_seconds(self) -> float:
        """GPU-seconds of the run up to now."""
        return self.earlier_seconds + self.num_gpus * (time.monotonic() - self.began)

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
    earlier = spending.gpu_seconds if spending else 0.0
    if run is not None:
        earlier = _of_execution(parents, run.execution)
    budget = StageBudget(3600 * limit, earlier, num_gpus, began)
    if budget.is_spent:
        raise budget.error()
    token = _current.set(budget)
    try:
        yield budget
    finally:
        _current.reset(token)
        if spending is not None:
            spending.gpu_seconds = budget.spent_seconds


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


def _of_execution(parents: Iterable[Path], execution: str) -> float:
    """GPU-seconds of all artifacts that led to a stage and were made by its execution."""
    made: dict[str, float] = {}
    for folder in parents:
        own = Manifest.read(folder)
        found = [own, *(each.manifest for each in ancestry_of(folder))]
        for manifest in found:
            if manifest is not None and manifest.run and manifest.run.execution == execution:
                made[manifest.name] = manifest.cost.gpu_seconds
    return sum(made.values())
