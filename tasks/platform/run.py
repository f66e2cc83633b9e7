"""A local run: its recording node by node, progress, log, table and short errors.

flytekit runs a workflow locally by calling `local_execute` of the workflow and of each sub-workflow
and task in it, and `sandbox_execute` only of tasks that are not cached. `install` wraps these three
to record nodes, cache hits and data flow; the rest of flytekit is unchanged.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import click
from flytekit.core.base_task import Task
from flytekit.core.workflow import WorkflowBase
from rich.console import Console

from nemo_rl_core.distributed import session
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.history.writer import HistoryWriter, NewExecution
from nemo_rl_core.store.git import git_state
from nemo_rl_core.store.manifest import package_versions
from nemo_rl_core.store.source_digest import source_digest
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.display import choose_display, show_on, summary_table
from nemo_rl_core.telemetry.events import subscribe
from nemo_rl_core.telemetry.run_log import RunLog, redirect_descriptors
from nemo_rl_core.telemetry.tracking import tracked
from tasks.platform.closing import closing_lines
from tasks.platform.local import on_cluster
from tasks.platform.preflight import preflight
from tasks.platform.recording import Recorder, said
from tasks.platform.values import plain
from tasks.recipes.recipe import Recipe


class NodeRecorder(Protocol):
    """What local execution calls for each node."""

    def call(
        self, entity: Task | WorkflowBase, kwargs: dict[str, Any], execute: Callable[[], Any]
    ) -> Any:
        """Runs a node, and returns flytekit's outputs."""

    def executes(self, task: Task) -> None:
        """Notes that the current node's task is executed, and not read from flytekit's cache."""


class RunFailed(click.ClickException):
    """A run that failed with an explained error, which pyflyte prints without a traceback."""


class RunRefused(RunFailed):
    """A run that was refused for its recipe or this machine, before its start."""

    exit_code = 2


@contextmanager
def run(workflow: WorkflowBase, inputs: dict[str, Any]) -> Iterator[Recorder]:
    """Runs locally: preflight checks, recording, progress, and a closing table.

    Raises:
        RunFailed: For every error; the traceback is in the run's log.
    """
    try:
        store = Store.default()
        store.check_writable()
        preflight(inputs)
    except NemoRLError as error:
        raise RunRefused(str(error)) from error
    ray_was_running = _ray_runs()
    with ExitStack() as stack:
        stack.callback(store.release)
        log = stack.enter_context(RunLog.start(store))
        terminal = stack.enter_context(redirect_descriptors(log.path))
        display = choose_display(terminal)
        stack.callback(show_on(display))
        writer = HistoryWriter(store, log.folder.name)
        writer.begin(_execution(workflow, inputs, log.path))
        recorder = Recorder(writer, log.path)
        stack.callback(subscribe(recorder.listen))
        for recipe in (value for value in inputs.values() if isinstance(value, Recipe)):
            stack.enter_context(tracked(recipe.tracking, log.folder.name))
        try:
            yield recorder
        except BaseException as error:
            log.trace(error)
            writer.end("failed" if isinstance(error, Exception) else "aborted", said(error))
            raise _explained(error, log) from error
        else:
            writer.end("succeeded")
        finally:
            display.close()
            if not ray_was_running:
                session.shutdown()
        _close(recorder, log, terminal)


def _execution(workflow: WorkflowBase, inputs: dict[str, Any], log_path: Path) -> NewExecution:
    commit, dirty = git_state(Path(__file__).parent)
    module = workflow.name.rpartition(".")[0]
    return NewExecution(
        workflow=workflow.name,
        recipe=recipe_name(sys.argv),
        command=sys.argv,
        inputs=plain(inputs),
        log_path=log_path,
        git_commit=commit,
        git_dirty=dirty,
        packages=package_versions(),
        source_digest=source_digest(module),
    )


def recipe_name(command: list[str]) -> str:
    """Returns the recipe name in a command line, from a file name or the key `recipe`; else ""."""
    words = [word for pair in command for word in pair.split("=", 1)]
    if "--config" not in words[:-1]:
        return ""
    given = words[words.index("--config") + 1]
    if given.endswith((".yaml", ".yml")):
        return Path(given).stem
    try:
        config = json.loads(given)
    except ValueError:
        return ""
    return Path(str(config.get("recipe", ""))).stem if isinstance(config, dict) else ""


def _explained(error: BaseException, log: RunLog) -> BaseException:
    if isinstance(error, NemoRLError):
        return RunFailed(f"{error}\n  log: {log.path}")
    if isinstance(error, Exception):
        last = (str(error).splitlines() or [""])[-1].strip()[:300]
        return RunFailed(f"{type(error).__name__}: {last}\n  log: {log.path}")
    return error


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized())


def _close(recorder: Recorder, log: RunLog, terminal: Any) -> None:
    console = Console(file=terminal, highlight=False, soft_wrap=False)
    console.print(summary_table(recorder.records))
    for line in closing_lines(recorder.artifacts):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"log: {log.path}", markup=False, soft_wrap=True)


__all__ = ["RunFailed", "RunRefused", "install"]

_running: list[NodeRecorder] = []
"""The current run, if there is one."""


@contextmanager
def recording_by(recorder: NodeRecorder) -> Iterator[None]:
    """Within it, workflows are recorded by `recorder`, and are no runs of their own."""
    _running.append(recorder)
    try:
        yield
    finally:
        _running.remove(recorder)


def install() -> None:
    """Wraps flytekit's local execution; no-op on a cluster and if repeated."""
    if on_cluster() or hasattr(WorkflowBase.local_execute, "__wrapped__"):
        return
    WorkflowBase.local_execute = _wrap_workflow(WorkflowBase.local_execute)
    Task.local_execute = _wrap_task(Task.local_execute)
    Task.sandbox_execute = _wrap_sandbox(Task.sandbox_execute)


def _wrap_workflow(original: Any) -> Any:
    @functools.wraps(original)
    def local_execute(self: WorkflowBase, ctx: Any, **kwargs: Any) -> Any:
        if _running:
            return _running[-1].call(self, kwargs, lambda: original(self, ctx, **kwargs))
        with run(self, kwargs) as recorder, recording_by(recorder):
            return original(self, ctx, **kwargs)

    return local_execute


def _wrap_task(original: Any) -> Any:
    @functools.wraps(original)
    def local_execute(self: Task, ctx: Any, **kwargs: Any) -> Any:
        if not _running:
            return original(self, ctx, **kwargs)
        return _running[-1].call(self, kwargs, lambda: original(self, ctx, **kwargs))

    return local_execute


def _wrap_sandbox(original: Any) -> Any:
    @functools.wraps(original)
    def sandbox_execute(self: Task, ctx: Any, input_literal_map: Any) -> Any:
        if _running:
            _running[-1].executes(self)
        return original(self, ctx, input_literal_map)

    return sandbox_execute
