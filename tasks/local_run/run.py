"""A local run: its recording node by node, progress, log, table and short errors.

flytekit runs a workflow locally by calling `local_execute` of the workflow and of each sub-workflow
and task in it, and `sandbox_execute` only of tasks that are not cached. `install` wraps these three
to record nodes, cache hits and data flow, `execute` of a task, which a mapped task calls for its
elements, and `__call__` of a workflow, whose result `pyflyte run` prints; the rest of flytekit
is unchanged.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

import click
from flytekit.clis.sdk_in_container.run import YamlFileReadingCommand
from flytekit.core.base_task import Task
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.core.workflow import WorkflowBase

from nemo_rl_core.distributed import session
from nemo_rl_core.distributed.isolation import with_packages
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.history.writer import HistoryWriter, NewExecution
from nemo_rl_core.store.git import git_state
from nemo_rl_core.store.manifest import package_versions
from nemo_rl_core.store.source_digest import source_digest
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.budget import LIMIT, counted_run, limit_from
from nemo_rl_core.telemetry.console import console_on, program, short_path
from nemo_rl_core.telemetry.display import choose_display, show_on
from nemo_rl_core.telemetry.display_lines import summary_table
from nemo_rl_core.telemetry.events import subscribe
from nemo_rl_core.telemetry.notices import check_addresses
from nemo_rl_core.telemetry.run_log import RunLog, redirect_descriptors
from nemo_rl_core.telemetry.tracking import tracked
from tasks.flyte.local import on_cluster
from tasks.local_run import starting
from tasks.local_run.closing import closing_lines
from tasks.local_run.command_help import widen_error_boxes
from tasks.local_run.preflight import preflight
from tasks.local_run.recording import Recorder, error_text
from tasks.local_run.values import plain
from tasks.ray_cluster.stopping import StopSignals, stopped_lines, typed_command
from tasks.recipes.common import PipelineRecipe, Recipe, default_name
from tasks.recipes.sweep import SweepRecipe
from tasks.stage.notifying import notify, successful_end


class NodeRecorder(Protocol):
    """Interface that local execution calls for each node."""

    def call(
        self, entity: Task | WorkflowBase, kwargs: dict[str, Any], execute: Callable[[], Any]
    ) -> Any:
        """Runs a node, and returns flytekit's outputs."""

    def executes(self, task: Task) -> None:
        """Notes that the current node's task is executed, and not read from flytekit's cache."""

    def inside(self, task: Task, inputs: dict[str, Any], execute: Callable[[], Any]) -> Any:
        """Runs a task's function, which another task may have called; returns its result."""


class RunFailed(click.ClickException):
    """A run that failed with an explained error, which pyflyte prints without a traceback."""


class RunRefused(RunFailed):
    """A run that was refused for its recipe or this machine, before its start."""

    exit_code = 2


@contextmanager
def run(workflow: WorkflowBase, inputs: dict[str, Any]) -> Iterator[Recorder]:
    """Runs locally: preflight checks, recording, progress, and a closing table.

    Every error becomes `RunFailed`, with the traceback in the run's log; a stop from outside ends
    the process, see `StopSignals`.
    """
    starting.end_startup()
    with StopSignals() as signals:
        store = _checked_store(inputs)
        ray = sys.modules.get("ray")
        ray_was_running = ray is not None and ray.is_initialized()
        with ExitStack() as stack:
            stack.callback(store.release)
            stack.enter_context(counted_run(_max_gpu_hours(inputs)))
            log = stack.enter_context(RunLog.start(store))
            terminal = stack.enter_context(redirect_descriptors(log.path))
            if not ray_was_running:
                stack.callback(session.shutdown)  # after the last line: workers take seconds to end
            signals.report_to(terminal.fileno())
            stack.callback(signals.report_to, None)
            display = choose_display(terminal)
            stack.callback(display.close)
            stack.callback(show_on(display))
            writer = HistoryWriter(store, log.folder.name)
            writer.begin(_execution(workflow, inputs, log.path))
            recorder = Recorder(
                writer, log.path, lambda error: signals.stopped_by(error) is not None
            )
            stack.callback(subscribe(recorder.listen))
            for recipe in (value for value in inputs.values() if isinstance(value, Recipe)):
                labels = {
                    "workflow": workflow.name.rpartition(".")[2],
                    "recipe": recipe_name(sys.argv),
                }
                stack.enter_context(tracked(recipe.tracking, log.folder.name, labels))
            began = time.monotonic()
            name = f"{workflow.name.rpartition('.')[2]} {log.folder.name}"
            try:
                yield recorder
            except BaseException as error:
                log.trace(error)
                stopped = signals.stopped_by(error)
                if stopped is None:
                    writer.end("failed", error_text(error))
                    _notify(terminal, name, "failed", [error_text(error), f"log: {log.path}"])
                    raise _explained(error, log) from error
                seconds = time.monotonic() - began
                lines = stopped_lines(stopped, recorder.stopped_at, seconds=seconds)
                writer.end("stopped", "\n".join(lines))
                display.close()
                _close(recorder, log, terminal, lines)
                _notify(terminal, name, "stopped", lines)
                raise KeyboardInterrupt from error
            writer.end("succeeded")
            display.close()
            # A custom workflow may have none of the stages whose results are shown.
            last = [f"{each.stage}: {each.folder}" for each in recorder.artifacts[-1:]]
            outcome, lines = successful_end(
                recorder.records, closing_lines(recorder.artifacts) or last
            )
            _close(recorder, log, terminal, lines)
            _notify(terminal, name, outcome, lines)
            _ended.append(log.folder.name)


def _checked_store(inputs: dict[str, Any]) -> Store:
    try:
        store = Store.default()
        store.check_writable()
        check_addresses(os.environ)
        limit_from(os.environ.get(LIMIT))
        preflight(inputs)
    except NemoRLError as error:
        raise RunRefused(str(error)) from error
    except KeyboardInterrupt:
        click.echo("stopped from outside before the run began: nothing was started", err=True)
        raise
    return store


def _max_gpu_hours(inputs: dict[str, Any]) -> float | None:
    recipes = [value for value in inputs.values() if isinstance(value, Recipe)]
    limits = [limit for each in recipes if (limit := each.budget.max_gpu_hours) is not None]
    return min(limits, default=None)


def _with_packages(value: Any) -> Any:
    """Returns a recipe with the packages of `isolation`, whose file may change after the run."""
    if isinstance(value, SweepRecipe):
        return value.model_copy(update={"base": _with_packages(value.base)})
    if isinstance(value, PipelineRecipe):
        return value.model_copy(update={"isolation": with_packages(value.isolation)})
    return value


def _execution(workflow: WorkflowBase, inputs: dict[str, Any], log_path: Path) -> NewExecution:
    commit, dirty = git_state(Path(__file__).parent)
    module = workflow.name.rpartition(".")[0]
    return NewExecution(
        workflow=workflow.name,
        recipe=recipe_name(sys.argv) or _default_recipe(workflow, inputs),
        command=recorded_command(),
        inputs=plain({name: _with_packages(value) for name, value in inputs.items()}),
        log_path=log_path,
        git_commit=commit,
        git_dirty=dirty,
        packages=package_versions(),
        source_digest=source_digest(module),
    )


def _default_recipe(workflow: WorkflowBase, inputs: dict[str, Any]) -> str:
    _, default = workflow.python_interface.inputs_with_defaults.get("config", (None, None))
    name = default_name(default)
    return name if name is not None and inputs.get("config") == default else ""


def recorded_command() -> list[str]:
    """Returns the words of the command as typed: `nemo-rl run` replaces `sys.argv` by pyflyte's."""
    for index, word in enumerate(sys.orig_argv):
        if Path(word).name == "nemo-rl":
            return ["nemo-rl", *sys.orig_argv[index + 1 :]]
    return sys.argv


def recipe_name(command: list[str]) -> str:
    """Returns the recipe name in a command line, from a file name or the key `recipe`; else ""."""
    words = [word for pair in command for word in pair.split("=", 1)]
    if "--config" not in words[:-1]:
        return ""
    config_value = words[words.index("--config") + 1]
    if config_value.endswith((".yaml", ".yml")):
        return Path(config_value).stem
    try:
        config = json.loads(config_value)
    except ValueError:
        return ""
    return Path(str(config.get("recipe", ""))).stem if isinstance(config, dict) else ""


def _explained(error: BaseException, log: RunLog) -> BaseException:
    if not isinstance(error, Exception):
        return error
    last = (str(error).splitlines() or [""])[-1].strip()[:300]
    text = str(error) if isinstance(error, NemoRLError) else f"{type(error).__name__}: {last}"
    return RunFailed(
        f"{text}\n  log: {short_path(log.path)}\n  page: {program()} ui\n"
        f"  resume with: {typed_command(sys.orig_argv)}"
    )


def _close(recorder: Recorder, log: RunLog, terminal: TextIO, lines: Sequence[str]) -> None:
    console = console_on(terminal)
    console.print(summary_table(recorder.records))
    for line in [*lines, f"log: {short_path(log.path)}", f"page: {program()} ui"]:
        console.print(line, markup=False, soft_wrap=True)


def _notify(terminal: TextIO, run: str, outcome: str, lines: Sequence[str]) -> None:
    for problem in notify(run, outcome, lines):
        text = f"the notice of the run's end was not sent: {problem}"
        console_on(terminal).print(text, markup=False, soft_wrap=True)


class EndedRun:
    """Prints a closing command in `pyflyte run`, instead of the repr of the outputs."""

    def __init__(self, outputs: Any, execution: str) -> None:
        self.outputs, self._execution = outputs, execution

    def __str__(self) -> str:
        return f"run: {program()} runs {self._execution}"


__all__ = ["RunFailed", "RunRefused", "install_recording"]

_running: list[NodeRecorder] = []
"""The current run, if there is one."""

_ended: list[str] = []
"""Ids of the runs of this process that succeeded."""


@contextmanager
def recording_by(recorder: NodeRecorder) -> Iterator[None]:
    """Makes `recorder` record the workflows that are called in the `with` block."""
    _running.append(recorder)
    try:
        yield
    finally:
        _running.remove(recorder)


def install_recording() -> None:
    """Wraps flytekit's local execution; no-op on a cluster and if repeated."""
    if on_cluster() or hasattr(WorkflowBase.local_execute, "__wrapped__"):
        return
    widen_error_boxes()
    WorkflowBase.__call__ = _wrap_call(WorkflowBase.__call__)
    WorkflowBase.local_execute = _wrap_workflow(WorkflowBase.local_execute)
    Task.local_execute = _wrap_task(Task.local_execute)
    Task.sandbox_execute = _wrap_sandbox(Task.sandbox_execute)
    PythonFunctionTask.execute = _wrap_execute(PythonFunctionTask.execute)


def _wrap_call(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: WorkflowBase, *args: Any, **kwargs: Any) -> Any:
        before = len(_ended)
        outputs = original(self, *args, **kwargs)
        is_run = len(_ended) > before and not _running
        return EndedRun(outputs, _ended[-1]) if is_run and _pyflyte_prints() else outputs

    return call


def _pyflyte_prints() -> bool:
    """Whether the caller is `pyflyte run`, which prints what a workflow returns."""
    context = click.get_current_context(silent=True)
    return context is not None and isinstance(context.command, YamlFileReadingCommand)


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


def _wrap_execute(original: Any) -> Any:
    @functools.wraps(original)
    def execute(self: PythonFunctionTask, **kwargs: Any) -> Any:
        if not _running:
            return original(self, **kwargs)
        return _running[-1].inside(self, kwargs, lambda: original(self, **kwargs))

    return execute
