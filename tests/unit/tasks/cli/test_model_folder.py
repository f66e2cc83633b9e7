"""The argument that names a model."""

from pathlib import Path

import pytest

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.store.manifest import Cost, Manifest
from nemo_rl_core.store.store import Store
from tasks.cli.records.names import model_folder


def made(digest: str) -> tuple[Path, Manifest]:
    """Creates an artifact with a model in the store."""
    folder = Store.default().artifacts / f"export-{digest * 8}"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    manifest = Manifest(
        kind="model",
        format="hf",
        stage="export",
        content_hash=digest * 32,
        step=1,
        parents=(),
        cost=Cost(wall_seconds=1.0, tokens=0),
        created_at="2026-01-01T00:00:00+00:00",
    )
    manifest.write(folder)
    return folder, manifest


def test_a_model_folder_is_found_by_its_path_or_its_artifacts(own_store: Path) -> None:
    folder, _ = made("ab")
    assert model_folder(str(folder)) == folder / "model"
    assert model_folder(str(folder / "model")) == folder / "model"
    assert model_folder("nowhere") == Path("nowhere")


@pytest.mark.slow
def test_an_artifact_is_found_by_its_id_or_a_prefix_of_id_or_hash(own_store: Path) -> None:
    (folder, manifest), other = made("ab"), made("cd")
    assert model_folder(folder.name) == folder / "model"  # also without a record of runs
    writer = HistoryWriter(Store.default(), "run")
    writer.begin(
        NewExecution(workflow="w", recipe="", command=[], inputs={}, log_path=own_store / "log")
    )
    node = writer.begin_node("export", task="tasks.export.export", kind="task")
    writer.end_node(node, NodeEnd("succeeded", made=[(folder, manifest), other]))
    writer.end("succeeded")
    assert model_folder("export-ab") == folder / "model"
    assert model_folder("abab") == folder / "model"
    assert model_folder("nowhere") == Path("nowhere")
    with pytest.raises(StoreError, match="matches several artifacts"):
        model_folder("export-")
