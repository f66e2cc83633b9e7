"""Failure records of workflows, with the command to resume.

Flyte runs a workflow's failure handler with the workflow's inputs and the error as `err`, and
requires the same input types, so every pipeline has a handler.
"""

import json
import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

import click
from flytekit import Deck, task
from flytekit.types.error.error import FlyteError

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.console import short_path
from nemo_rl_core.telemetry.curves import completions_html
from tasks.flyte.local import on_cluster
from tasks.pods.resources import DECK, PLAIN
from tasks.ray_cluster.experimental.ray_job_api import RayJobApi
from tasks.ray_cluster.experimental.run_cluster import give_back
from tasks.recipes.common import PipelineRecipe, Recipe, RecipeError
from tasks.stage.container import track_end
from tasks.stage.notifying import cluster_run, notify

_LOG = logging.getLogger(__name__)


failure_handler = task(**{**PLAIN.options, **DECK})
"""A task that Flyte runs after a workflow has failed."""

_leaves_records: ContextVar[bool] = ContextVar("leaves_records", default=True)


@contextmanager
def without_records() -> Iterator[None]:
    """Disables records of failed workflows: a dry run has nothing to resume."""
    token = _leaves_records.set(False)
    try:
        yield
    finally:
        _leaves_records.reset(token)


def leave_record(module: str, workflow: str, config: Recipe, err: FlyteError | None) -> None:
    """Writes `failures/<time>-<workflow>.json` and the recipe next to it, and shows both in a deck.

    On a cluster it also sends the notice of the run's end, informs trackers, and releases the Ray
    cluster that the run's stages share. Refused and dry runs leave no record: there is nothing to
    resume.
    """
    # Locally flytekit calls this while it handles the error; refused runs exit with 2.
    is_refused = getattr(sys.exception(), "exit_code", None) == RecipeError.exit_code
    if is_refused or not _leaves_records.get():
        return
    if on_cluster():
        _give_back_cluster(config)
        notify(cluster_run(), "failed", [err.message if err else ""])
        track_end("failed")
    now = datetime.now(UTC)
    name = f"{now:%Y%m%dT%H%M%S.%f}-{workflow}"
    folder = Store.default().root / "failures"
    recipe = folder / f"{name}.recipe.json"
    record = {
        "workflow": workflow,
        "when": now.isoformat(timespec="seconds"),
        "error": err.message if err else "not known: Flyte handed none over",
        "failed_node": err.failed_node_id if err else "",
        "resume": f"pyflyte run workflows/{module}.py {workflow} "
        f"--config {shlex.quote(str(recipe))}",
        "what_is_kept": "stages that had ended are in the cache; the one that was cut off resumes "
        "from its last save",
    }
    Deck("failure", completions_html([record]))
    try:
        write_atomic(recipe, json.dumps(config.model_dump(mode="json"), indent=1))
        write_atomic(folder / f"{name}.json", json.dumps(record, indent=1))
    except (NemoRLError, OSError):
        # Probably the cause of the run's failure too; an error here would replace that one.
        _LOG.warning("the record of the failure cannot be written", exc_info=True)
        return
    click.echo(f"  record, and how to resume: {short_path(folder / name)}.json", err=True)


def _give_back_cluster(config: Recipe) -> None:
    if not isinstance(config, PipelineRecipe) or config.cluster.lifetime != "run":
        return
    try:
        give_back(RayJobApi())
    except NemoRLError:  # after its idle limit the cluster goes by itself
        _LOG.warning("the run's Ray cluster was not released", exc_info=True)
