"""The pipelines that commands run; `workflows/cli.py` passes them down with the command group."""

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from nemo_rl_core.config.names import unknown_names

if TYPE_CHECKING:
    from flytekit.core.workflow import WorkflowBase


class Pipelines(Mapping[str, str]):
    """The name of the workflow in each pipeline's module, by the name of the module.

    Args:
        workflows: Names of modules and their workflows.
        cluster_check: The workflow that checks a cluster, as `module:workflow`.
    """

    def __init__(self, workflows: Mapping[str, str], *, package: str, cluster_check: str) -> None:
        self._workflows = dict(sorted(workflows.items()))
        self._package, self._cluster_check = package, cluster_check

    def __getitem__(self, name: str) -> str:
        return self._workflows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._workflows)

    def __len__(self) -> int:
        return len(self._workflows)

    def refuse_unknown(self, name: str) -> None:
        """Refuses a name that is not a pipeline."""
        if name not in self._workflows:
            raise unknown_names(
                "there is no pipeline", [name], list(self), otherwise="choose one of them"
            )

    def workflow(self, name: str) -> "WorkflowBase":
        """Imports and returns the workflow of a pipeline."""
        return _imported(f"{self._package}.{name}:{self[name]}")

    def cluster_check(self) -> "WorkflowBase":
        """Imports and returns the workflow that checks a cluster."""
        return _imported(self._cluster_check)


def current_pipelines() -> Pipelines:
    """Returns the pipelines of the command that is running."""
    pipelines: Pipelines = click.get_current_context().obj
    return pipelines


def complete_pipelines(
    context: click.Context, _parameter: Any, incomplete: str
) -> list[CompletionItem]:
    """Completes the name of a pipeline."""
    return [CompletionItem(name) for name in context.obj if name.startswith(incomplete)]


def _imported(path: str) -> "WorkflowBase":
    module, _, attribute = path.partition(":")
    workflow: WorkflowBase = getattr(importlib.import_module(module), attribute)
    return workflow
