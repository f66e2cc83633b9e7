"""What every stage does around its work: one folder, one lock, one manifest."""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flytekit import Cache, dynamic, task
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.core.workflow import WorkflowBase
from pydantic import BaseModel

from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.source_digest import source_digest
from nemo_rl_core.store.stage_run import StageRun
from tasks.artifacts import Artifact
from tasks.platform import literal_types, local
from tasks.platform.attempts import current_attempt
from tasks.platform.cluster_limit import refuse_limit_that_stages_miss
from tasks.platform.cluster_tracking import tracked_stage
from tasks.platform.object_stores import close_sessions_at_exit
from tasks.platform.ray_stage import ray_stage
from tasks.platform.resources import DECK, PLAIN, Kind
from tasks.platform.retries import retried_on_cluster
from tasks.platform.shapes import one_gpu
from tasks.platform.uploads import uploaded

literal_types.register()
local.use_store()


def _record_runs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has the first workflow that runs install the recording of runs, whoever wrote it."""

    def call(self: WorkflowBase, *args: Any, **kwargs: Any) -> Any:
        if hasattr(WorkflowBase.local_execute, "__wrapped__"):
            return original(self, *args, **kwargs)
        # It imports the recipes, which import this module.
        importlib.import_module("tasks.platform.run").install_recording()
        return WorkflowBase.__call__(self, *args, **kwargs)

    return call


if local.on_cluster():
    close_sessions_at_exit()
else:
    WorkflowBase.__call__ = _record_runs(WorkflowBase.__call__)
    if "--remote" in sys.argv:
        importlib.import_module("tasks.platform.flyte_answers").explain_uploads()


def plan_task(function: Callable[..., Any]) -> Any:
    """A task that deals a recipe out to the stages: quicker to run than to look up in the cache."""

    @functools.wraps(function)
    def checked(config: Any) -> Any:
        refuse_limit_that_stages_miss(config.budget)
        return function(config=config)

    return task(**PLAIN.options)(checked)


uncached_task = task(**PLAIN.options)
"""A task that runs every time, for what it does and not for what it returns."""

choice = dynamic(**PLAIN.options)
"""A `@dynamic` that reads a config to choose which stages run, how often and on what shape."""


def cached_task(kind: Kind = PLAIN, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`flytekit.task`, cached by the inputs and by the source that the stage can reach.

    The module of the stage declares `NUMERICS_VERSION`. A higher number makes the stage run again
    where nothing that its key covers has changed, as after a fault of a driver or a disk.

    Args:
        kind: What the stage reserves on a cluster, and how often and how long it may try.
        options: Of `flytekit.task`, laid over those of the kind.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        cache = Cache(version=source_digest(function.__module__), serialize=kind.serialize)
        given = {**DECK, **kind.options, **options}
        if not kind.on_ray:
            return task(cache=cache, **given)(function)
        stage = task(cache=cache, **given, **ray_stage(kind))(function)
        # Registered too: a dynamic stage knows only images of tasks that were registered with it.
        stage.on_shape(one_gpu())
        return stage

    return decorate


def run_inside(stage: PythonFunctionTask, **inputs: Any) -> Any:
    """Runs a stage within another stage; a local run records it as a node inside the other's.

    Args:
        stage: A task; its function runs in this process.
        inputs: Inputs of the task, as Python values.
    """
    # Not `stage.execute`: on a cluster it would replace the handler of SIGTERM of the outer stage.
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

    The folder is known by the stage's inputs and source: a killed attempt is continued, and of two
    processes that run the same stage at once, the second takes what the first has made. On a
    cluster, where the next attempt may have another disk, what is saved is in the object store too,
    and so is a large artifact when this returns.

    Args:
        module: `__name__` of the module that defines the stage: the key covers its source, and
            all that it reaches.
        stage: Name of the stage.
        config: The settings that the stage reads; with the parents, its whole input.
        parents: Artifacts that the stage reads, by role.
        work: Fills the folder; may find there what an interrupted attempt left.
        part: Which of several artifacts of the stage, or which iteration.

    Returns:
        The fields that all artifacts share.
    """
    inputs = StageInputs(
        stage=stage,
        settings=config.model_dump(mode="json"),
        # Of parents on a cluster the work downloads what it reads, when it reads it.
        parents={role: parent.records for role, parent in parents.items()},
        source=source_digest(module),
        part=part,
        # The digest covers it with the rest of the module.
        numerics_version=getattr(sys.modules[module], "NUMERICS_VERSION", 1),
    )
    run = StageRun.from_environment(os.environ, task=f"{module}.{stage}")
    with tracked_stage(), retried_on_cluster():
        attempt = current_attempt()
        if attempt is None:
            artifact = produce(inputs, work, run=run)
        else:
            saved_work = functools.partial(attempt.run, work=work)
            artifact = produce(inputs, saved_work, run=run, hash_of=attempt.saves.hash_of)
        directory = uploaded(artifact, attempt)
    _show_deck(artifact)
    manifest = Manifest.read(artifact)
    return {
        "directory": directory,
        "stage": manifest.stage,
        "content_hash": manifest.content_hash,
        "step": manifest.step,
        "summary": (artifact / "summary.txt").read_text(),
    }


def _show_deck(artifact: Path) -> None:
    from flytekit import Deck

    html = (artifact / "deck.html").read_text()
    if html:
        Deck(artifact.name, html)
