"""What every stage does around its work: one folder, one lock, one manifest."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory
from pydantic import BaseModel

from nemo_rl_core.history.stage_run import recorded
from nemo_rl_core.infra.lineage import Manifest
from nemo_rl_core.infra.produce import Inputs, Made, produce
from tasks import local
from tasks.artifacts import Artifact
from tasks.caching import source_digest

local.use_store()


def cached_task(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`flytekit.task`, cached by the inputs and by the source that the stage can reach."""

    def decorate(function: Callable[..., Any]) -> Any:
        cache = Cache(version=source_digest(function.__module__))
        return task(cache=cache, enable_deck=True, **options)(function)

    return decorate


def make(
    stage: str,
    *,
    config: BaseModel,
    parents: Mapping[str, Artifact],
    work: Callable[[Path], Made],
    part: str = "",
) -> dict[str, Any]:
    """Runs a stage's work in a folder of the store and publishes it as an artifact.

    The folder is known by the stage's inputs and source: a killed attempt is continued, and of two
    processes that run the same stage at once, the second takes what the first has made.

    Args:
        stage: Name of the stage.
        config: The settings that the stage reads; with the parents, its whole input.
        parents: Artifacts that the stage reads, by role.
        work: Fills the folder; may find there what an interrupted attempt left.
        part: Which of several artifacts of the stage, or which iteration.

    Returns:
        The fields that all artifacts share.
    """
    caller = inspect.stack()[1].frame.f_globals["__name__"]
    inputs = Inputs(
        stage=stage,
        settings=config.model_dump(mode="json"),
        parents={role: parent.folder for role, parent in parents.items()},
        source=source_digest(caller),
        part=part,
    )
    work = recorded(work, os.environ, task=f"{caller}.{stage}", parents=inputs.parents)
    artifact = produce(inputs, work)
    _show_deck(artifact)
    manifest = Manifest.read(artifact)
    return {
        "directory": FlyteDirectory(str(artifact)),
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
