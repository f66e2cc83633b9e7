"""The pipelines that commands run; `workflows/cli.py` passes them down with the command group."""

import importlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from flytekit.core.workflow import WorkflowBase


class Pipelines(Mapping[str, str]):
    """The name of the workflow in each pipeline's module, by the name of the module.

    Args:
        others: The pipelines that are not named after an algorithm.
        cluster_check: The workflow that checks a cluster, as `module:workflow`.
    """

    def __init__(self, others: Mapping[str, str], *, package: str, cluster_check: str) -> None:
        self._others, self._package, self._cluster_check = others, package, cluster_check

    @cached_property
    def _workflows(self) -> dict[str, str]:
        # Imports pydantic, which `nemo-rl --help` does not need.
        from nemo_rl_core.algorithms.declarations import ALGORITHMS

        algorithm_pipelines = {each.pipeline: each.pipeline for each in ALGORITHMS.values()}
        return dict(sorted({**self._others, **algorithm_pipelines}.items()))

    def __getitem__(self, name: str) -> str:
        return self._workflows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._workflows)

    def __len__(self) -> int:
        return len(self._workflows)

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


def _imported(path: str) -> "WorkflowBase":
    module, _, attribute = path.partition(":")
    workflow: WorkflowBase = getattr(importlib.import_module(module), attribute)
    return workflow
