"""A small store with a record of runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.history.writer import HistoryWriter, NewExecution
from nemo_rl_core.store.manifest import Cost, Manifest
from nemo_rl_core.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def begin(store: Store) -> Callable[..., HistoryWriter]:
    """Returns a function that begins an execution with an id."""

    def start(execution: str, **fields: Any) -> HistoryWriter:
        writer = HistoryWriter(store, execution)
        defaults = {
            "workflow": "workflows.grpo.grpo",
            "recipe": "grpo_ci",
            "command": ["pyflyte", "run"],
            "inputs": {"config": {"seed": 3}},
            "log_path": store.runs / execution / "run.log",
        }
        writer.begin(NewExecution(**(defaults | fields)))
        return writer

    return start


@pytest.fixture
def make_artifact(store: Store) -> Callable[..., tuple[Path, Manifest]]:
    """Returns a function that creates a folder in the store with a manifest."""

    def make(stage: str, digest: str, *parents: tuple[Path, Manifest]) -> tuple[Path, Manifest]:
        folder = store.artifacts / f"{stage.partition(' ')[0]}-{digest * 8}"
        folder.mkdir(parents=True)
        manifest = Manifest(
            kind="checkpoint",
            format="hf",
            stage=stage,
            content_hash=digest * 32,
            step=4,
            parents=tuple(parent.ref(path) for path, parent in parents),
            cost=Cost(wall_seconds=2.0, tokens=10),
            created_at="2026-01-01T00:00:00+00:00",
        )
        manifest.write(folder)
        return folder, manifest

    return make
