"""Artifacts that pass through flytekit stay complete, and are identified by their content."""

from pathlib import Path
from typing import Annotated, get_args

import pytest
from flytekit import HashMethod
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from pydantic import ValidationError

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.manifest import Manifest
from tasks import artifacts
from tasks.artifacts import (
    Artifact,
    CheckpointArtifact,
    DatasetArtifact,
    EvalReport,
    LineageReport,
    PromotionDecision,
    TokenizerArtifact,
)


def make(kind: type[Artifact], folder: Path, **fields: object) -> Artifact:
    shared = {"stage": "train_sft", "content_hash": "ab" * 32, "step": 4, "summary": "loss → 1.0"}
    return kind(directory=FlyteDirectory(str(folder)), **{**shared, **fields})


@pytest.mark.parametrize(
    ("kind", "annotated", "fields"),
    [
        (TokenizerArtifact, artifacts.Tokenizer, {}),
        (DatasetArtifact, artifacts.Dataset, {}),
        (CheckpointArtifact, artifacts.Checkpoint, {}),
        (
            EvalReport,
            artifacts.Evaluation,
            {"metrics": {"greedy_accuracy": 0.25}, "measured": "train_sft"},
        ),
        (
            PromotionDecision,
            artifacts.Promotion,
            {"promoted": True, "difference": 0.5, "low": 0.25, "high": 0.75},
        ),
        (LineageReport, artifacts.Lineage, {}),
    ],
)
def test_an_artifact_survives_conversion_by_flytekit(
    tmp_path: Path, kind: type[Artifact], annotated: object, fields: dict
) -> None:
    context = FlyteContextManager.current_context()
    (tmp_path / "text.txt").write_text("content")
    sent = make(kind, tmp_path, **fields)
    literal_type = TypeEngine.to_literal_type(annotated)
    literal = TypeEngine.to_literal(context, sent, annotated, literal_type)
    # Flyte's cache does not compare the path.
    assert literal.hash == "ab" * 32
    received = TypeEngine.to_python_value(context, literal, kind)
    assert type(received) is kind
    assert received.model_dump(exclude={"directory"}) == sent.model_dump(exclude={"directory"})
    assert (received.folder / "text.txt").read_text() == "content"


@pytest.mark.parametrize("kind", ["Tokenizer", "Dataset", "Checkpoint", "Evaluation", "Promotion"])
def test_every_name_for_signatures_is_hashed_by_content(kind: str) -> None:
    annotated = getattr(artifacts, kind)
    assert isinstance(annotated, type(Annotated[int, 0]))
    record, method = get_args(annotated)
    assert issubclass(record, Artifact)
    assert isinstance(method, HashMethod)


def test_equal_content_in_another_folder_is_equal_to_the_cache(tmp_path: Path) -> None:
    one, other = (make(DatasetArtifact, tmp_path / name) for name in ("a", "b"))
    changed = make(DatasetArtifact, tmp_path / "a", content_hash="cd" * 32)
    hashes = [artifacts.content_hash(each) for each in (one, other, changed)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_an_artifact_is_frozen_and_closed(tmp_path: Path) -> None:
    artifact = make(DatasetArtifact, tmp_path)
    with pytest.raises(ValidationError):
        artifact.step = 5
    with pytest.raises(ValidationError):
        make(DatasetArtifact, tmp_path, color="red")


def test_a_checkpoint_names_its_model(tmp_path: Path) -> None:
    checkpoint = make(CheckpointArtifact, tmp_path)
    assert isinstance(checkpoint, CheckpointArtifact)
    assert checkpoint.model_folder == tmp_path / "model"
    assert str(checkpoint) == f"CheckpointArtifact(abababababab in {tmp_path})"


def test_the_manifest_is_read_from_the_folder(tmp_path: Path) -> None:
    artifact = make(DatasetArtifact, tmp_path)
    with pytest.raises(StoreError, match="not an artifact"):
        _ = artifact.manifest
    written = Manifest(kind="dataset", format="parquet", stage="x", content_hash="ab" * 32)
    written.write(tmp_path)
    assert artifact.manifest == written
