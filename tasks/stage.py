"""What every stage does around its work: one folder, one lock, one manifest."""

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory
from pydantic import BaseModel

from nemo_rl_core.infra.files import hash_folder
from nemo_rl_core.infra.lineage import (
    MANIFEST,
    Cost,
    Manifest,
    config_hash,
    git_state,
    package_versions,
)
from nemo_rl_core.infra.store import Store
from tasks.artifacts import Artifact
from tasks.caching import source_digest

VOLATILE = (MANIFEST, "metrics.jsonl", "finished.json", "deck.html", "summary.txt")
"""Files of an artifact that hold times; they are left out of its content hash."""


@dataclass(frozen=True)
class Made:
    """What a stage's work has put into its folder.

    Attributes:
        kind: Such as "dataset" or "checkpoint".
        format: Of the files.
        summary: One line for the table at the end of a run.
        num_tokens: Generated and trained on.
        peak_memory_gib: Of all workers, summed.
        step: The training step the artifact belongs to; 0 before any.
        deck: HTML for Flyte's deck, and for `deck.html` in the artifact.
    """

    kind: str
    format: str
    summary: str = ""
    num_tokens: int = 0
    peak_memory_gib: float = 0.0
    step: int = 0
    deck: str = ""


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
    source = source_digest(caller)
    settings = config.model_dump(mode="json")
    hashes = {role: parent.content_hash for role, parent in parents.items()}
    key = config_hash({"config": settings, "parents": hashes, "part": part, "source": source})[:32]
    store = Store.default()
    with store.work_folder(stage, key) as folder:
        artifact = store.published(stage, key)
        if artifact is None:
            start = time.monotonic()
            made = work(folder)
            commit, dirty = git_state(Path(__file__).parent)
            manifest = Manifest(
                kind=made.kind,
                format=made.format,
                stage=f"{stage} {part}".strip(),
                content_hash=hash_folder(folder, exclude=VOLATILE),
                weights_hash=_weights_hash(folder),
                step=made.step,
                config_hash=config_hash(settings),
                config=settings,
                seed=settings.get("seed"),
                git_commit=commit,
                git_dirty=dirty,
                source_digest=source,
                packages=package_versions(),
                parents=tuple(p.manifest.ref(p.folder) for p in parents.values()),
                cost=Cost(
                    wall_seconds=round(time.monotonic() - start, 3),
                    tokens=made.num_tokens,
                    peak_memory_gib=round(made.peak_memory_gib, 3),
                ),
            )
            manifest.write(folder)
            (folder / "deck.html").write_text(made.deck)
            (folder / "summary.txt").write_text(made.summary)
            # The key goes into the name: equal content made from other inputs has other parents.
            name = config_hash({"content": manifest.content_hash, "key": key})
            artifact = store.publish(folder, stage=stage, content_hash=name)
    _show_deck(artifact)
    manifest = Manifest.read(artifact)
    return {
        "directory": FlyteDirectory(str(artifact)),
        "stage": manifest.stage,
        "content_hash": manifest.content_hash,
        "step": manifest.step,
        "summary": (artifact / "summary.txt").read_text(),
    }


def _weights_hash(folder: Path) -> str | None:
    weights = folder / "model"
    return hash_folder(weights) if weights.is_dir() else None


def _show_deck(artifact: Path) -> None:
    from flytekit import Deck

    html = (artifact / "deck.html").read_text()
    if html:
        Deck(artifact.name, html)
