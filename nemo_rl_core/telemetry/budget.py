"""A limit of GPU-hours for a run: the stage that reaches it saves a checkpoint and ends the run.

On one machine, the stages of a run share a process, which keeps the total. On a cluster, every
attempt of a stage records its usage on the shared volume. The usage of attempts that are not
recorded there is read from the manifests of ancestors that the same execution made.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from nemo_rl_core.errors import ConfigError, ResourceError
from nemo_rl_core.store.ancestry import ancestry_of
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.manifest import Manifest, StageRun
from nemo_rl_core.store.store import Store

WRITE_EVERY_SECONDS = 20.0


class AttemptRecord:
    """The GPU-seconds of one attempt on the shared volume, next to those of the other attempts.

    It is updated while the attempt runs, so the usage of a killed one is known to within
    `WRITE_EVERY_SECONDS`.
    """

    def __init__(self, run: StageRun) -> None:
        self._run = run
        self._folder = Store.default().gpu_seconds / run.execution
        self._path = self._folder / f"{run.task}-{run.attempt}-{uuid4().hex[:8]}.json"

    def write(self, gpu_seconds: float) -> None:
        """Writes the usage of the attempt so far."""
        self._folder.mkdir(parents=True, exist_ok=True)
        record = {"run": self._run.model_dump(), "gpu_seconds": gpu_seconds}
        write_atomic(self._path, json.dumps(record))

    def read_others(self) -> dict[StageRun, float]:
        """Returns GPU-seconds of all other attempts of the execution."""
        records = [
            json.loads(path.read_text())
            for path in self._folder.glob("[!.]*.json")
            if path != self._path
        ]
        return {StageRun(**each["run"]): each["gpu_seconds"] for each in records}

    @contextmanager
    def updated(self, update: Callable[[], None]) -> Iterator[None]:
        """Calls `update` at the start, regularly during the body, and at the end.

        After the first call, errors of the volume do not end the stage.
        """
        ended = threading.Event()

        def repeat() -> None:
            while not ended.wait(WRITE_EVERY_SECONDS):
                with suppress(OSError):
                    update()

        thread = threading.Thread(target=repeat, name="gpu-seconds", daemon=True)
        update()
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(OSError):
                update()


LIMIT = "NEMO_RL_MAX_GPU_HOURS"
"""Environment variable with the limit."""


@dataclass
class RunSpending:
    """Usage of the stages of a run on one machine."""

    gpu_seconds: float = 0.0
    max_gpu_hours: float | None = None


@dataclass
class StageBudget:
    """The remaining GPU time of a stage.

    Attributes:
        earlier_seconds: GPU-seconds of the run outside of this attempt of the stage.
    """

    limit_seconds: float
    earlier_seconds: float
    num_gpus: int
    began: float

    @property
    def attempt_seconds(self) -> float:
        """GPU-seconds of this attempt of the stage so far."""
        return self.num_gpus * (time.monotonic() - self.began)

    @property
    def spent_seconds(self) -> float:
        """GPU-seconds of the run so far."""
        return self.earlier_seconds + self.attempt_seconds

    @property
    def is_spent(self) -> bool:
        """Whether the run has reached its limit."""
        return self.spent_seconds >= self.limit_seconds

    def error(self, *, step: int | None = None) -> ResourceError:
        """Returns the error that ends the run, after the last saved step."""
        action = "starts" if step is None else f"resumes from step {step}"
        return ResourceError(
            "the run has used its GPU-hours",
            expected=f"at most {self.limit_seconds / 3600:.4g} GPU-hours ({LIMIT}, or "
            "budget.max_gpu_hours of the recipe)",
            got=f"{self.spent_seconds / 3600:.4g} on {self.num_gpus} GPUs",
            fix=f"raise the limit and run the same command again: the stage {action}",
        )


_spending: ContextVar[RunSpending | None] = ContextVar("spending", default=None)
_current: ContextVar[StageBudget | None] = ContextVar("stage_budget", default=None)


@contextmanager
def counted_run(max_gpu_hours: float | None = None) -> Iterator[RunSpending]:
    """Counts the stages in the body as one run, whose limit `NEMO_RL_MAX_GPU_HOURS` overrides."""
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
    """Ends the loop of the stage in the body when the run reaches its limit of GPU-hours."""
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
    record, ancestors = AttemptRecord(run), _ancestor_seconds(parents, run.execution)

    def update() -> None:
        budget.earlier_seconds = sum((ancestors | record.read_others()).values())
        record.write(budget.attempt_seconds)

    with record.updated(update):
        yield


def current_budget() -> StageBudget | None:
    """Returns the budget of the running stage; None without a limit."""
    return _current.get()


def limit_from(text: str | None) -> float | None:
    """Parses the value of the variable `LIMIT` in GPU-hours; None if it is empty."""
    if not text:
        return None
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 < hours < float("inf"):
        raise ConfigError(
            f"{LIMIT} is not a number of GPU-hours",
            expected="a positive number, such as 12.5",
            got=text,
            fix=f"correct {LIMIT}, or unset it",
        )
    return hours


def _ancestor_seconds(parents: Iterable[Path], execution: str) -> dict[StageRun, float]:
    gpu_seconds: dict[StageRun, float] = {}
    for folder in parents:
        for manifest in (Manifest.read(folder), *(each.manifest for each in ancestry_of(folder))):
            if manifest is not None and manifest.run and manifest.run.execution == execution:
                gpu_seconds[manifest.run] = manifest.cost.gpu_seconds
    return gpu_seconds
