"""A second stage on a node reads its parents from disk; tests count bytes from an S3 server."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flytekit import FlyteContextManager
from flytekit.configuration import DataConfig, S3Config
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.utils.asyn import run_sync

from nemo_rl_core.errors import StoreError
from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store import locks
from nemo_rl_core.store.files import digest_of, list_files
from nemo_rl_core.store.manifest import DIGESTS
from nemo_rl_core.store.node_cache import FOLDER, GIB
from nemo_rl_core.store.store import Store, damage
from tasks.artifacts import CheckpointArtifact
from tasks.stage import container
from tests.hostile_names import hostile_names
from tests.workflows.flyte_backend.buckets import S3Bucket

FILES = {
    "rows.parquet": b"rows" * 50_000,
    "model/config.json": b"{}",
    "model/a.safetensors": b"a" * 700_000,
    "model/b.safetensors": b"b" * 500_000,
    "trainer/moments.bin": b"moments" * 100_000,
}
MODEL = ["model/a.safetensors", "model/b.safetensors", "model/config.json"]


@pytest.fixture
def bucket(own_store: Path) -> Iterator[S3Bucket]:
    """A bucket with an artifact."""

    def work(folder: Path) -> StageResult:
        for name, content in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return StageResult("checkpoint", "hf")

    made = produce(StageInputs("train_sft", {}), work)
    with S3Bucket("127.0.0.1") as started:
        for name in list_files(made):
            started.write(f"parent/{name}", (made / name).read_bytes())
        yield started
        run_sync(container._close_sessions)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "node"
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv(GIB, "1")
    yield folder
    locks.unshare(folder / "marks")


class Stage:
    """The work of a container with its input: each has a new disk, or a new folder on the volume.

    Args:
        bucket: Bucket with the artifact.
        disk: Folder that flytekit downloads into.
    """

    def __init__(self, bucket: S3Bucket, disk: Path) -> None:
        self._bucket, self._disk = bucket, disk

    def __enter__(self) -> CheckpointArtifact:
        environment = self._bucket.environment
        s3 = S3Config(
            endpoint=environment["FLYTE_AWS_ENDPOINT"],
            access_key_id=environment["FLYTE_AWS_ACCESS_KEY_ID"],
            secret_access_key=environment["FLYTE_AWS_SECRET_ACCESS_KEY"],
        )
        access = FileAccessProvider(self._disk, self._bucket.url("raw"), DataConfig(s3=s3))
        context_with_access = FlyteContextManager.current_context().with_file_access(access)
        self._manager = FlyteContextManager.with_context(context_with_access)
        context = self._manager.__enter__()
        kind = TypeEngine.to_literal_type(CheckpointArtifact)
        directory = FlyteDirectory(self._bucket.url("parent"))
        artifact = CheckpointArtifact(
            directory=directory, stage="train_sft", content_hash="ab" * 32
        )
        literal = TypeEngine.to_literal(context, artifact, CheckpointArtifact, kind)
        fetched: CheckpointArtifact = TypeEngine.to_python_value(
            context, literal, CheckpointArtifact
        )
        return fetched

    def __exit__(self, *_: object) -> None:
        self._manager.__exit__(None, None, None)


def sent(bucket: S3Bucket) -> dict[str, int]:
    """Bytes of the artifact's content since the last call."""
    sent_bytes = {name: n for name in FILES if (n := bucket.sent[f"parent/{name}"])}
    bucket.sent.clear()
    return sent_bytes


def sizes(*names: str) -> dict[str, int]:
    return {name: len(FILES[name]) for name in names}


@pytest.mark.slow
def test_a_second_stage_on_the_node_downloads_nothing(
    bucket: S3Bucket, cache: Path, tmp_path: Path
) -> None:
    with Stage(bucket, tmp_path / "first") as artifact:
        model = artifact.model_folder
        assert (model / "a.safetensors").read_bytes() == FILES["model/a.safetensors"]
    assert sent(bucket) == sizes("rows.parquet", *MODEL), "each once, and not the rest"
    with Stage(bucket, tmp_path / "second") as artifact:
        assert (artifact.model_folder / "b.safetensors").read_bytes() == FILES[MODEL[1]]
        assert sent(bucket) == {}
        folder = artifact.folder
        assert damage(folder) == ""
        assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert sent(bucket) == sizes("trainer/moments.bin")
    assert (folder / "model/a.safetensors").readlink().is_relative_to(cache)


def test_without_a_cache_every_stage_downloads(bucket: S3Bucket, tmp_path: Path) -> None:
    for disk in ("first", "second"):
        with Stage(bucket, tmp_path / disk) as artifact:
            assert not (artifact.model_folder / "a.safetensors").is_symlink()
        assert sent(bucket) == sizes("rows.parquet", *MODEL)


def test_downloads_of_a_ray_stage_are_copies_on_the_volume(bucket: S3Bucket, cache: Path) -> None:
    for attempt in ("first", "second"):
        with Stage(bucket, Store.default().inputs / attempt) as artifact:
            folder = artifact.folder
            assert folder.is_relative_to(Store.default().inputs)
            assert not any((folder / name).is_symlink() for name in FILES)
            assert {name: (folder / name).read_bytes() for name in FILES} == FILES
        assert sent(bucket) == (sizes(*FILES) if attempt == "first" else {})


def test_files_that_do_not_fit_the_cache_are_downloaded(
    bucket: S3Bucket, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GIB, str(600_000 / 2**30))
    for disk in ("first", "second"):
        with Stage(bucket, tmp_path / disk) as artifact:
            model = artifact.model_folder
            assert {f"model/{path.name}": path.read_bytes() for path in model.iterdir()} == {
                name: FILES[name] for name in MODEL
            }
        assert sent(bucket)["model/a.safetensors"] == 700_000, "larger than the cache"
        num_kept_bytes = sum(path.stat().st_size for path in (cache / "files").iterdir())
        assert num_kept_bytes <= 600_000


def test_damage_in_the_bucket_is_found_as_without_a_cache(
    bucket: S3Bucket, cache: Path, tmp_path: Path
) -> None:
    bucket.write("parent/model/a.safetensors", b"c" * 700_000)
    with (
        Stage(bucket, tmp_path / "first") as artifact,
        pytest.raises(StoreError, match=r"(?s)parent is damaged.*a\.safetensors"),
    ):
        _ = artifact.model_folder
    first_bytes = {path.read_bytes()[:1] for path in (cache / "files").iterdir()}
    assert b"c" not in first_bytes


KILLED = """
import os, signal, sys
from pathlib import Path
from s3fs import S3FileSystem
from tests.unit.tasks.test_kept_downloads import Stage
from tests.hostile_names import hostile_names
from tests.workflows.flyte_backend.buckets import S3Bucket

class Given(S3Bucket):
    def __init__(self):
        self.environment = dict(os.environ)

get_file = S3FileSystem.get_file
def half(self, source, path, **options):
    get_file(self, source, path, **options)
    if source.endswith("b.safetensors"):
        os.truncate(path, 1000)
        os.kill(os.getpid(), signal.SIGKILL)
S3FileSystem.get_file = half
with Stage(Given(), Path(sys.argv[1])) as artifact:
    artifact.model_folder
"""


@pytest.mark.slow
def test_a_killed_download_leaves_no_partial_file(
    bucket: S3Bucket, cache: Path, tmp_path: Path
) -> None:
    environment: dict[str, Any] = {**os.environ, **bucket.environment}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "killed"], env=environment, check=False
    )
    assert killed.returncode == -9
    assert 1000 in [path.stat().st_size for path in (cache / "files").glob(".*")]
    sent(bucket)
    with Stage(bucket, tmp_path / "next") as artifact:
        assert (artifact.model_folder / "b.safetensors").read_bytes() == FILES[MODEL[1]]
    again = sent(bucket)
    assert again["model/b.safetensors"] == 500_000
    assert "rows.parquet" not in again, "it was complete before the kill"
    assert list((cache / "files").glob(".*")) == []


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["surplus", "in the digests", "without digests"])
def test_hostile_names_write_nothing_outside_of_the_artifact(
    bucket: S3Bucket, tmp_path: Path, kind: str
) -> None:
    """100 names of an object in the artifact's folder; flytekit's recursive download follows them.

    The digests of the second kind are those of the manifest, as their writer can make them.
    """
    manifest = bucket.read("parent/manifest.json")
    digests = json.loads(bucket.read(f"parent/{DIGESTS}") or b"")
    if kind == "without digests":
        bucket.remove(f"parent/{DIGESTS}")
    counts: Counter[str] = Counter()
    for number, name in enumerate(hostile_names(tmp_path / "elsewhere")):
        bucket.write(f"parent/model/{name}", b"evil")
        if kind == "in the digests":
            forged = digests | {f"model/{name}": hashlib.sha256(b"evil").hexdigest()}
            fields = json.loads(manifest or b"") | {"content_hash": digest_of(forged)}
            del fields["checksum"]
            bucket.write("parent/manifest.json", json.dumps(fields).encode())
            bucket.write(f"parent/{DIGESTS}", json.dumps(forged).encode())
        disk = tmp_path.joinpath(str(number), *"abcdefghijklmn", "disk")
        folder = None
        with Stage(bucket, disk) as artifact:
            folder = Path(artifact.directory.path)
            try:
                _ = artifact.model_folder
            except StoreError:
                counts["refused"] += 1
            else:
                counts["inside"] += 1
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        evil = [path for path in written if path.read_bytes() == b"evil"]
        assert [path for path in evil if not path.is_relative_to(folder)] == [], name
        shutil.rmtree(tmp_path / str(number))
        bucket.remove(f"parent/model/{name}")
    assert counts.total() == 100
    assert counts["refused"] >= 74, counts
