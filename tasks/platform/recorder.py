"""What a local run does, node by node: wraps flytekit's local execution.

flytekit runs a workflow here by calling `local_execute` of the workflow, of each sub-workflow and
task in it, and `sandbox_execute` only of tasks whose result is not in the cache. Wrapping these
three is how this module knows what runs, what was cached, and what flows from where to where;
nothing else of flytekit is touched.
"""

import functools
from typing import Any

from flytekit.core.base_task import Task
from flytekit.core.workflow import WorkflowBase

from tasks.platform.local import on_cluster
from tasks.platform.recording import Recorder
from tasks.platform.run import RunFailed, RunRefused, run

__all__ = ["RunFailed", "RunRefused", "install"]

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
            return _running[-1].call(self, kwargs, lambda: original(self, ctx, **kwargs))
        with run(self, kwargs) as recorder:
            _running.append(recorder)
            try:
                return original(self, ctx, **kwargs)
            finally:
                _running.remove(recorder)

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
