"""A local run as its user sees it: progress, log, table, and errors in a few lines.

flytekit runs a workflow here by calling `local_execute` of the workflow, of each task in it, and
`sandbox_execute` only of tasks whose result is not in the cache. Wrapping these three is how this
module knows what runs and what was cached; nothing else of flytekit is touched.
"""

import functools
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import click
from flytekit.core.base_task import Task
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.core.workflow import WorkflowBase
from rich.console import Console

from nemo_rl_core.distributed import session
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.infra.display import choose_display, show_on, summary_table
from nemo_rl_core.infra.lineage import Cost
from nemo_rl_core.infra.logging import (
    RunLog,
    StageRecord,
    StageStarted,
    publish,
    redirect_descriptors,
)
from nemo_rl_core.infra.store import Store
from tasks.artifacts import Artifact
from tasks.closing import closing_lines
from tasks.local import on_cluster
from tasks.preflight import preflight


class RunFailed(click.ClickException):
    """A run that ended with an explained error, which pyflyte prints without a trace."""


class RunRefused(RunFailed):
    """A run that its recipe or this machine does not allow; nothing was started."""

    exit_code = 2


class Recorder:
    """What happens in one run, stage by stage."""

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self.records: list[StageRecord] = []
        self.artifacts: list[Artifact] = []
        self._ran: set[str] = set()

    @contextmanager
    def stage(self, task: Task, inputs: dict[str, Any]) -> Iterator["_Outcome"]:
        """Records one call of a cached task."""
        name = _stage_name(task, inputs)
        outcome = _Outcome()
        start = time.monotonic()
        publish(StageStarted(name))
        try:
            yield outcome
        except BaseException:
            self._add(StageRecord(name, "failed", time.monotonic() - start))
            raise
        cached = task.name not in self._ran
        self._ran.discard(task.name)
        # A stage may pass an input on, as `promote` does; only what it made itself is its own.
        own = task.name.rpartition(".")[2]
        made = [a for a in outcome.artifacts if a.stage.split()[0] == own]
        costs = [artifact.manifest.cost for artifact in made if not cached]
        record = StageRecord(
            name,
            "cached" if cached else "ran",
            time.monotonic() - start,
            tokens=sum(cost.tokens for cost in costs),
            peak_memory_gib=max((cost.peak_memory_gib for cost in costs), default=0.0),
            note=", ".join(artifact.summary for artifact in made if artifact.summary),
            cost=costs[0] if len(costs) == 1 else reduce(Cost.plus, costs, Cost()),
        )
        self.artifacts += made
        self._add(record)

    def executes(self, task: Task) -> None:
        """Says that the task's result was not in the cache."""
        self._ran.add(task.name)

    def _add(self, record: StageRecord) -> None:
        self.records.append(record)
        publish(record)


class _Outcome:
    artifacts: list[Artifact]

    def __init__(self) -> None:
        self.artifacts = []


_running: list[Recorder] = []
"""The run in progress: one or none."""


def install() -> None:
    """Wraps flytekit's local execution; a no-op on a cluster and the second time."""
    if on_cluster() or hasattr(WorkflowBase.local_execute, "__wrapped__"):
        return
    WorkflowBase.local_execute = _wrap_workflow(WorkflowBase.local_execute)
    Task.local_execute = _wrap_task(Task.local_execute)
    Task.sandbox_execute = _wrap_sandbox(Task.sandbox_execute)


def _wrap_workflow(original: Any) -> Any:
    @functools.wraps(original)
    def local_execute(self: WorkflowBase, ctx: Any, **kwargs: Any) -> Any:
        if _running:
            return original(self, ctx, **kwargs)
        with run(kwargs):
            return original(self, ctx, **kwargs)

    return local_execute


def _wrap_task(original: Any) -> Any:
    @functools.wraps(original)
    def local_execute(self: Task, ctx: Any, **kwargs: Any) -> Any:
        if not _running or not self.metadata.cache:
            return original(self, ctx, **kwargs)
        with _running[-1].stage(self, kwargs) as outcome:
            promises = original(self, ctx, **kwargs)
            outcome.artifacts = _artifacts(self, promises)
            return promises

    return local_execute


def _wrap_sandbox(original: Any) -> Any:
    @functools.wraps(original)
    def sandbox_execute(self: Task, ctx: Any, input_literal_map: Any) -> Any:
        if _running:
            _running[-1].executes(self)
        return original(self, ctx, input_literal_map)

    return sandbox_execute


def _stage_name(task: Task, inputs: dict[str, Any]) -> str:
    name = task.name.rpartition(".")[2]
    iteration = inputs.get("iteration")
    return f"{name} {iteration}" if isinstance(iteration, int) else name


def _artifacts(task: Task, promises: Any) -> list[Artifact]:
    """What the stage returned, as records."""
    ctx = FlyteContextManager.current_context()
    outputs = promises if isinstance(promises, tuple) else (promises,)
    types = list(task.python_interface.outputs.values())
    values = [
        TypeEngine.to_python_value(ctx, promise.val, kind)
        for promise, kind in zip(outputs, types, strict=True)
    ]
    return [value for value in values if isinstance(value, Artifact)]


@contextmanager
def run(inputs: dict[str, Any]) -> Iterator[Recorder]:
    """One local run: checks the ground, shows progress, and closes with a table.

    Raises:
        RunFailed: For every error; the trace is in the run's log.
    """
    try:
        store = Store.default()
        store.check_writable()
        preflight(inputs)
    except NemoRLError as error:
        raise RunRefused(str(error)) from error
    ray_was_running = _ray_runs()
    with ExitStack() as stack:
        log = stack.enter_context(RunLog.start(store))
        terminal = stack.enter_context(redirect_descriptors(log.path))
        display = choose_display(terminal)
        stack.callback(show_on(display))
        recorder = Recorder(log)
        _running.append(recorder)
        try:
            yield recorder
        except BaseException as error:
            log.trace(error)
            raise _explained(error, log) from error
        finally:
            _running.remove(recorder)
            display.close()
            if not ray_was_running:
                session.shutdown()
        _close(recorder, terminal)


def _explained(error: BaseException, log: RunLog) -> BaseException:
    if isinstance(error, NemoRLError):
        return RunFailed(f"{error}\n  log: {log.path}")
    if isinstance(error, Exception):
        said = (str(error).splitlines() or [""])[-1].strip()[:300]
        return RunFailed(f"{type(error).__name__}: {said}\n  log: {log.path}")
    return error


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized())


def _close(recorder: Recorder, terminal: Any) -> None:
    console = Console(file=terminal, highlight=False, soft_wrap=False)
    console.print(summary_table(recorder.records))
    for line in closing_lines(recorder.artifacts):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"log: {recorder.log.path}", markup=False, soft_wrap=True)
