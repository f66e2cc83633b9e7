"""Common code around the work of every stage: one folder, one lock, one manifest."""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flytekit import Cache, current_context, dynamic, task
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.core.workflow import WorkflowBase
from flytekit.types.directory import FlyteDirectory
from pydantic import BaseModel

from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.manifest import Manifest, StageRun
from nemo_rl_core.store.source_digest import source_digest
from tasks.artifacts import Artifact
from tasks.flyte import local
from tasks.flyte.retries import retried_on_cluster
from tasks.pods.resources import DECK, PLAIN, Kind
from tasks.pods.shapes import one_gpu
from tasks.ray_cluster.ray_stage import ray_stage
from tasks.stage import literal_types
from tasks.stage.attempts import StageAttempt
from tasks.stage.container import (
    close_sessions_at_exit,
    refuse_limit_unknown_to_stages,
    tracked_stage,
)
from tasks.stage.uploads import uploaded

literal_types.register()
local.use_store()


def _record_runs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the first call of a workflow, defined in any module, install the recording of runs."""

    def call(self: WorkflowBase, *args: Any, **kwargs: Any) -> Any:
        if hasattr(WorkflowBase.local_execute, "__wrapped__"):
            return original(self, *args, **kwargs)
        # Imported here, since it imports the recipes, which import this module.
        importlib.import_module("tasks.local_run.run").install_recording()
        return WorkflowBase.__call__(self, *args, **kwargs)

    return call


if local.on_cluster():
    close_sessions_at_exit()
else:
    WorkflowBase.__call__ = _record_runs(WorkflowBase.__call__)
    if "--remote" in sys.argv:
        importlib.import_module("tasks.flyte.flyte_answers").explain_uploads()


def plan_task(function: Callable[..., Any]) -> Any:
    """A task that splits a recipe for the stages: quicker to run than to look up in the cache."""

    @functools.wraps(function)
    def checked(config: Any) -> Any:
        refuse_limit_unknown_to_stages(config.budget)
        return function(config=config)

    return task(**PLAIN.options)(checked)


uncached_task = task(**PLAIN.options)
"""A task that runs every time, for its effect and not for its result."""

dynamic_stage = dynamic(**PLAIN.options)
"""A `@dynamic` that reads a config to choose which stages run, how often and on what shape."""


def cached_task(kind: Kind = PLAIN, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`flytekit.task`, cached by the inputs and by the source that the stage can reach.

    The module of the stage declares `NUMERICS_VERSION`. A higher number changes its key
    and so makes it run again, for example after a fault of a driver or a disk.

    Args:
        kind: Resources of the stage on a cluster, its time limit and its retries.
        options: Options of `flytekit.task`, which override those of the kind.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        cache = Cache(version=source_digest(function.__module__), serialize=kind.serialize)
        settings = {**DECK, **kind.options, **options}
        if not kind.on_ray:
            return task(cache=cache, **settings)(function)
        stage = task(cache=cache, **settings, **ray_stage(kind))(function)
        # Registered too: a dynamic stage knows only images of tasks that were registered with it.
        stage.on_shape(one_gpu())
        return stage

    return decorate


def run_inside(stage: PythonFunctionTask, **inputs: Any) -> Any:
    """Runs a stage within another stage; a local run records it as a node inside the other's."""
    # Not `stage.execute`: on a cluster it would replace the outer stage's handler of SIGTERM.
    return PythonFunctionTask.execute(stage, **inputs)


def make(
    module: str,
    stage: str,
    *,
    config: BaseModel,
    parents: Mapping[str, Artifact],
    work: Callable[[Path], StageResult],
    part: str = "",
) -> dict[str, Any]:
    """Runs a stage's work in a folder of the store and publishes it as an artifact.

    The folder depends on the stage's inputs and source: a killed attempt is continued, and if two
    processes run the same stage at once, the second uses the result of the first. On a cluster,
    where the next attempt may have another disk, saves are in the object store too, and so is a
    large artifact when this returns.

    Args:
        module: `__name__` of the module that defines the stage: the key covers its source, and
            all of its imports.
        stage: Name of the stage.
        config: The settings that the stage reads; with the parents, its complete input.
        parents: Artifacts that the stage reads, by role.
        work: Fills the folder; may find files of an interrupted attempt there.
        part: Which of several artifacts of the stage, or which iteration.

    Returns:
        The fields that all artifacts share.
    """
    inputs = StageInputs(
        stage=stage,
        settings=config.model_dump(mode="json"),
        # On a cluster, the work downloads the parts of parents that it reads, when it reads them.
        parents={role: parent.records for role, parent in parents.items()},
        source=source_digest(module),
        part=part,
        # For the manifest; the digest of the source covers the number already.
        numerics_version=getattr(sys.modules[module], "NUMERICS_VERSION", 1),
    )
    run = StageRun.from_environment(os.environ, task=f"{module}.{stage}")
    if run is not None:
        with tracked_stage(), retried_on_cluster():
            artifact, directory = _make_on_cluster(inputs, work, run)
    else:
        artifact = produce(inputs, work)
        directory = FlyteDirectory(str(artifact))
    _show_deck(artifact)
    manifest = Manifest.read(artifact)
    return {
        "directory": directory,
        "stage": manifest.stage,
        "content_hash": manifest.content_hash,
        "step": manifest.step,
        "summary": (artifact / "summary.txt").read_text(),
    }


def _make_on_cluster(
    inputs: StageInputs, work: Callable[[Path], StageResult], run: StageRun
) -> tuple[Path, FlyteDirectory]:
    attempt = StageAttempt(current_context().checkpoint)
    artifact = produce(
        inputs,
        functools.partial(attempt.run, work=work),
        run=run,
        hash_of=attempt.saves.hash_of,
    )
    return artifact, uploaded(artifact, attempt)


def _show_deck(artifact: Path) -> None:
    from flytekit import Deck

    html = (artifact / "deck.html").read_text()
    if html:
        Deck(artifact.name, html)
