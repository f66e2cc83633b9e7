"""A stage in a container downloads only the parts of its parents that it reads, all verified."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory

from nemo_rl_core.errors import StoreError
from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.files import list_files
from nemo_rl_core.store.manifest import DIGESTS, LEFT_OUT
from nemo_rl_core.store.store import damage
from tasks.artifacts import CheckpointArtifact

REMOTE = "memory://bucket/parent"
TOP = {"manifest.json", "ancestors.json", "metrics.jsonl", "deck.html", "summary.txt", DIGESTS}
FILES = {
    "model/config.json": "{}",
    "model/model.safetensors": "weights",
    "trainer/state.json": json.dumps({"backend": "dtensor", "num_updates": 3}),
    "trainer/rank-0/moments.bin": "moments",
    "rollouts/step-1.parquet": "rollouts",
    "metrics.jsonl": "",
}


def uploaded(files: dict[str, str]) -> fsspec.AbstractFileSystem:
    """An artifact that `produce` has made of these files, in a bucket."""

    def work(folder: Path) -> StageResult:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return StageResult("checkpoint", "hf")

    made = produce(StageInputs("train_sft", {}), work)
    bucket = fsspec.filesystem("memory")
    bucket.rm("/bucket", recursive=True) if bucket.exists("/bucket") else None
    bucket.put(f"{made}/", "/bucket/parent/", recursive=True)
    return bucket


@pytest.fixture
def bucket(own_store: Path) -> Iterator[fsspec.AbstractFileSystem]:
    yield uploaded(FILES)


def downloaded() -> CheckpointArtifact:
    """The artifact as an input of a container: nothing is downloaded yet."""
    context = FlyteContextManager.current_context()
    input_artifact = CheckpointArtifact(
        directory=FlyteDirectory(REMOTE), stage="train_sft", content_hash="ab" * 32
    )
    kind = TypeEngine.to_literal_type(CheckpointArtifact)
    literal = TypeEngine.to_literal(context, input_artifact, CheckpointArtifact, kind)
    artifact: CheckpointArtifact = TypeEngine.to_python_value(context, literal, CheckpointArtifact)
    return artifact


def here(artifact: CheckpointArtifact) -> set[str]:
    return set(list_files(Path(artifact.directory.path))) - TOP - {LEFT_OUT}


MODEL = {"model/config.json", "model/model.safetensors"}
READS: dict[str, tuple[Callable[[CheckpointArtifact], object], set[str]]] = {
    "its records": (lambda a: a.records, set()),
    "its manifest": (lambda a: a.manifest, set()),
    "its model": (lambda a: a.model_folder, MODEL),
    "its backend": (lambda a: a.backend, {"trainer/state.json"}),
    "all of it": (lambda a: a.folder, set(FILES) - TOP),
}


@pytest.mark.parametrize("name", READS)
def test_only_parts_that_are_read_are_downloaded(
    bucket: fsspec.AbstractFileSystem, name: str
) -> None:
    read, expected = READS[name]
    artifact = downloaded()
    read(artifact)
    assert here(artifact) == expected
    folder = Path(artifact.directory.path)
    assert damage(folder) == "", "files that were left out are known by their digests"
    assert (folder / LEFT_OUT).exists() == (name != "all of it")


def test_one_read_adds_to_another(bucket: fsspec.AbstractFileSystem) -> None:
    artifact = downloaded()
    assert artifact.backend == "dtensor"
    weights = artifact.model_folder / "model.safetensors"
    assert here(artifact) == {*MODEL, "trainer/state.json"}
    bucket.rm("/bucket/parent/model", recursive=True)
    assert artifact.model_folder == weights.parent, "what is here is not asked for again"
    moments = artifact.folder / "trainer/rank-0/moments.bin"
    assert moments.read_text() == "moments"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b.pipe("/bucket/parent/model/model.safetensors", b"weight?"), "the hash of"),
        (lambda b: b.rm("/bucket/parent/model/config.json"), "config.json is missing"),
        (lambda b: b.pipe("/bucket/parent/model/more.bin", b"more"), "more.bin is not part of it"),
        (lambda b: b.pipe(f"/bucket/parent/{DIGESTS}", b"{}"), "does not match its manifest"),
        (lambda b: b.pipe(f"/bucket/parent/{DIGESTS}", b"[]"), "not a JSON object"),
    ],
    ids=["changed", "missing", "more", "other digests", "damaged digests"],
)
def test_a_damaged_part_is_refused(
    bucket: fsspec.AbstractFileSystem,
    change: Callable[[fsspec.AbstractFileSystem], None],
    said: str,
) -> None:
    change(bucket)
    with pytest.raises(StoreError, match=f"(?s)bucket/parent is damaged.*{said}"):
        _ = downloaded().model_folder


def test_a_damaged_part_is_found_when_it_is_read(
    bucket: fsspec.AbstractFileSystem,
) -> None:
    bucket.pipe("/bucket/parent/trainer/rank-0/moments.bin", b"moment?")
    artifact = downloaded()
    assert (artifact.model_folder / "config.json").read_text() == "{}"
    with pytest.raises(StoreError, match=r"moments\.bin"):
        _ = artifact.folder


def test_an_artifact_without_digests_is_downloaded_completely(
    bucket: fsspec.AbstractFileSystem,
) -> None:
    bucket.rm(f"/bucket/parent/{DIGESTS}")
    artifact = downloaded()
    assert (artifact.model_folder / "config.json").read_text() == "{}"
    assert here(artifact) == set(FILES) - TOP


def test_lost_files_are_not_taken_for_skipped_ones(own_store: Path) -> None:
    uploaded(FILES)
    (folder,) = (own_store / "artifacts").iterdir()
    (folder / "trainer/state.json").unlink()
    assert "the hash of its content" in damage(folder)
