"""No external name leads a reader out of its folder: on S3 and in files, 100 names each."""

import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from nemo_rl_core.checkpoints.dcp_metadata import read_metadata
from nemo_rl_core.checkpoints.manager import CheckpointManager
from nemo_rl_core.checkpoints.object_saves import ObjectSaves
from nemo_rl_core.checkpoints.weight_files import weight_files
from nemo_rl_core.converters.materialize import _fetch_remote, download_gguf
from nemo_rl_core.data.datasets.files import read_named
from nemo_rl_core.errors import DataError, ModelError, NemoRLError, StoreError, UnsafePathError
from nemo_rl_core.history.cluster import import_folders
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.stored_paths import from_stored
from nemo_rl_core.store import remote
from nemo_rl_core.store.aliases import Aliases
from nemo_rl_core.store.manifest import ANCESTORS, Manifest, StageRun, read_digests
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store
from tests.hostile_names import hostile_names
from tests.workflows.flyte_backend.buckets import S3Bucket

EVIL = b'{"prompt": "1+1=", "answer": "2"}\n'


@pytest.fixture(scope="module")
def server() -> Iterator[S3Bucket]:
    with S3Bucket("127.0.0.1") as started:
        yield started


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store deep in a folder, so that files outside of it are detected."""
    store = Store(tmp_path.joinpath(*"abcdefghijklmn", "store"))
    store.check_writable()
    monkeypatch.setenv("NEMO_RL_HOME", str(store.root))
    return store


@pytest.fixture
def bucket(server: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Bucket]:
    for name in ("AWS_PROFILE", "FLYTE_AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.environment["FLYTE_AWS_ENDPOINT"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "its-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield server
    for path in server.list(""):
        server.remove(path)


def outcomes(
    tmp_path: Path, inside: Path, attempt: Callable[[str], object], *refusals: type[Exception]
) -> Counter[str]:
    """Counts the names that were refused, and those that stayed in the folder.

    Fails if a file outside of `inside` appears or changes.
    """

    def outside() -> dict[Path, int]:
        return {
            path: path.lstat().st_mtime_ns
            for path in tmp_path.rglob("*")
            if not path.is_relative_to(inside) and not path.is_dir()
        }

    counts: Counter[str] = Counter()
    before = outside()
    for name in hostile_names(tmp_path / "elsewhere"):
        try:
            attempt(name)
        except refusals as error:
            assert isinstance(error, NemoRLError), f"{name!r}: {error!r}"
            counts["refused"] += 1
        else:
            counts["inside"] += 1
        assert outside() == before, name
        for root in (Path("/evil"), Path("/evil.pth"), Path("/tmp/evil"), Path.cwd() / "evil"):
            assert not root.exists(), name
    return counts


@pytest.mark.slow
def test_names_below_a_folder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()

    def attempt(name: str) -> None:
        path = resolve_below(root, name, source="a test")
        assert os.path.normpath(path) == str(path)
        assert path.is_relative_to(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(EVIL)

    assert outcomes(tmp_path, root, attempt, UnsafePathError) == {"refused": 78, "inside": 22}


@pytest.mark.parametrize("kind", ["folder", "file", "loop", "folder above"])
def test_links_out_of_the_folder(tmp_path: Path, kind: str) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    (root / "plain").mkdir(parents=True)
    elsewhere.mkdir()
    target = {"folder": elsewhere, "file": elsewhere / "f", "loop": root / "link"}.get(
        kind, tmp_path
    )
    (root / "link").symlink_to(target)
    for name in ("link", "link/x"):
        with pytest.raises(UnsafePathError, match="through a link"):
            resolve_below(root, name, source="a test")
    assert resolve_below(root, "plain/x", source="a test") == root / "plain/x"
    (root / "plain/weights").symlink_to(elsewhere / "blob")
    resolve_below(root, "plain/weights", source="a test", may_link=True)
    # The root itself may be a link.
    (tmp_path / "other").symlink_to(root)
    resolve_below(tmp_path / "other", "plain/x", source="a test")


@pytest.mark.thorough
def test_models_in_a_bucket(tmp_path: Path, store: Store, bucket: S3Bucket) -> None:
    def attempt(name: str) -> None:
        for path in bucket.list(""):
            bucket.remove(path)
        bucket.write("m/config.json", b"{}")
        bucket.write(f"m/{name}", EVIL)
        _fetch_remote("s3://flyte-data/m")

    counts = outcomes(tmp_path, store.root, attempt, NemoRLError)
    assert counts == {"refused": 78, "inside": 22}


def test_a_model_in_a_bucket_with_a_hostile_name_is_refused(
    tmp_path: Path, store: Store, bucket: S3Bucket
) -> None:
    bucket.write("m/config.json", b"{}")
    for name in ("../" * 9 + "evil", f"/{tmp_path}/evil", "a\\b"):
        bucket.write(f"m/{name}", EVIL)
        with pytest.raises(UnsafePathError, match="the listing of s3://flyte-data/m names a file"):
            _fetch_remote("s3://flyte-data/m")
        bucket.remove(f"m/{name}")
    assert not list(tmp_path.rglob("evil"))


def test_a_model_in_a_bucket_with_folder_markers_is_fetched(store: Store, bucket: S3Bucket) -> None:
    for name in ("m/", "m/sub/"):
        bucket.write(name, b"")
    bucket.write("m/config.json", b"{}")
    bucket.write("m/sub/x.json", b"{}")
    folder = _fetch_remote("s3://flyte-data/m")
    assert (folder / "config.json").read_text() == (folder / "sub" / "x.json").read_text() == "{}"
    with pytest.raises(DataError, match="name the folder: s3://flyte-data/m"):
        remote.tree("s3://flyte-data/m/config.json")


@pytest.mark.thorough
def test_rows_in_a_bucket(tmp_path: Path, store: Store, bucket: S3Bucket) -> None:
    def attempt(name: str) -> None:
        for path in bucket.list(""):
            bucket.remove(path)
        bucket.write(f"rows/{name}.jsonl", EVIL)
        read_named("s3://flyte-data/rows/**/*.jsonl")

    counts = outcomes(tmp_path, store.root, attempt, NemoRLError)
    assert counts.total() == 100


@pytest.mark.slow
def test_saves_in_a_bucket(tmp_path: Path, bucket: S3Bucket) -> None:
    import hashlib

    import s3fs

    system = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    digest = hashlib.sha256(EVIL).hexdigest()
    address = f"flyte-data/one/files/{digest}"
    work = tmp_path.joinpath(*"abcdefghijklmn", "work")

    def attempt(name: str) -> None:
        file = {"sha256": digest, "num_bytes": len(EVIL), "address": address}
        bucket.write(f"one/files/{digest}", EVIL)
        bucket.write("one/save.json", json.dumps({"files": {name: file}}).encode())
        saves = ObjectSaves(system, "s3://flyte-data/two")
        saves.take_over("s3://flyte-data/one")
        work.mkdir(parents=True, exist_ok=True)
        saves.restore(work)

    counts = outcomes(tmp_path, work, attempt, StoreError)
    assert counts == {"refused": 78, "inside": 22}


def _index(folder: Path) -> Callable[[str], object]:
    def attempt(name: str) -> object:
        index = {"metadata": {}, "weight_map": {"w": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return weight_files(folder)

    return attempt


def _wheel(folder: Path) -> Callable[[str], object]:
    def attempt(name: str) -> object:
        wheel = folder.parent / "hostile-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(zipfile.ZipInfo(f"{name}.gguf"), EVIL)
            archive.writestr("hostile-1.0.dist-info/METADATA", "Name: hostile\nVersion: 1.0\n")
        wheel.rename(folder / wheel.name)
        return _extracted(folder)

    return attempt


def _extracted(folder: Path) -> Path:
    """Runs `download_gguf` without the download, which takes a second."""
    from unittest import mock

    with mock.patch("subprocess.run", return_value=mock.Mock(returncode=0, stderr="")):
        return download_gguf("hostile", folder)


def _digests(folder: Path) -> Callable[[str], object]:
    def attempt(name: str) -> object:
        (folder / "digests.json").write_text(json.dumps({name: "ab" * 32}))
        return read_digests(folder)

    return attempt


def _checkpoint(folder: Path) -> Callable[[str], object]:
    manager = CheckpointManager(folder)
    path = manager.save(1, lambda aside: (aside / "shard").write_text("x"))

    def attempt(name: str) -> None:
        entry = {"sha256": "ab" * 32, "bytes": 1}
        text = json.dumps({"step": 1, "metrics": {}, "files": {name: entry}})
        (path / "manifest.json").write_text(text)
        if manager.latest(verify=False) is None:
            raise StoreError("refused")

    return attempt


def _torch(folder: Path) -> Callable[[str], object]:
    import pickle

    save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    metadata = read_metadata(folder)

    def attempt(name: str) -> object:
        for each in metadata.storage_data.values():
            each.relative_path = name
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return read_metadata(folder)

    return attempt


def _stage_record(folder: Path) -> Callable[[str], object]:
    store = Store(folder)

    def attempt(name: str) -> None:
        store.work.mkdir(exist_ok=True)
        (store.work / "train_sft-abc.done").write_text(json.dumps({"artifact": name}))
        if store.published("train_sft", "abc") is None:
            raise StoreError("refused")

    return attempt


def _stored_path(folder: Path) -> Callable[[str], object]:
    return lambda name: from_stored(Store(folder), name or "/")


def _alias(folder: Path) -> Callable[[str], object]:
    (folder / "aliases").mkdir()

    def attempt(name: str) -> object:
        return Aliases(Store(folder), str(folder / "aliases")).get(name)

    return attempt


def _import(folder: Path) -> Callable[[str], object]:
    store = Store(folder / "store")
    run = StageRun(execution="e", workflow="w", task="t", attempt=1, started_at=1.0)
    manifest = Manifest(
        kind="model", format="hf", stage="s", name="s-cd", content_hash="cd" * 32, run=run
    )

    def attempt(name: str) -> None:
        made = folder / "made"
        made.mkdir(exist_ok=True)
        parent = Manifest(kind="model", format="hf", stage="s", name=name, content_hash="ab" * 32)
        manifest.write(made)
        (made / ANCESTORS).write_text(json.dumps({name: parent.model_dump(mode="json")}))
        import_folders(store, [made])
        with History(store) as history:
            path = Path(history.artifact(name).path)
        assert path.is_relative_to(store.artifacts)

    return attempt


READERS = {
    "an index of safetensors": (_index, ModelError),
    "a wheel": (_wheel, NemoRLError),
    "digests of an artifact": (_digests, StoreError),
    "a checkpoint's manifest": (_checkpoint, StoreError),
    "metadata of torch": (_torch, StoreError),
    "the record of a stage": (_stage_record, StoreError),
    "a path in the history": (_stored_path, StoreError),
    "the name of an alias": (_alias, StoreError),
    "an import's ancestors": (_import, StoreError),
}


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_names_in_files(tmp_path: Path, reader: str) -> None:
    make, refusal = READERS[reader]
    folder = tmp_path.joinpath(*"abcdefghijklmn")
    folder.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "evil").write_text("x")
    counts = outcomes(tmp_path, folder, make(folder), refusal)
    assert counts.total() == 100
    assert counts["refused"] >= 74, counts
