"""Recording of local runs node by node, by wrapping flytekit's local execution.

flytekit runs a workflow locally by calling `local_execute` of the workflow and of each sub-workflow
and task in it, and `sandbox_execute` only of tasks that are not cached. This module wraps these
three to record nodes, cache hits and data flow; the rest of flytekit is unchanged.
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
"""The current run, or None."""


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
