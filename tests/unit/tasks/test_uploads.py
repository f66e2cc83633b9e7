"""The artifact of a large stage reaches a real S3 server from its saves, also after a kill."""

import functools
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import ray
from flyteidl.core import literals_pb2
from flytekit import task
from flytekit.bin import entrypoint
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.models.literals import LiteralMap
from flytekit.types.directory import FlyteDirectory

import tasks.train_sft  # noqa: F401  # whose source the stage of these tests is known by
from nemo_rl_core.checkpoints import object_saves
from nemo_rl_core.checkpoints.manager import CheckpointManager
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store import files
from tasks.artifacts import CheckpointArtifact
from tasks.stage.attempts import StageAttempt
from tasks.stage.container import close_sessions_at_exit
from tasks.stage.stage import make
from tasks.stage.uploads import uploaded
from tests.workflows.flyte_backend.buckets import S3Bucket

SHARD_BYTES = object_saves.LARGE_BYTES + 1
NUM_SHARDS = 7
"""With the weights just above 64 MiB."""

LAST = ["digests.json", "manifest.json"]


def train(folder: Path) -> StageResult:
    """Work of a trainer: saves a step, and moves the last save into the artifact."""
    checkpoints = CheckpointManager(folder / "checkpoints")
    if checkpoints.latest() is None:
        (folder / "metrics.jsonl").write_text("1\n")
        checkpoints.save(1, _write_checkpoint)
    for part in ("model", "trainer"):
        (checkpoints.path(1) / part).rename(folder / part)
    files.discard(checkpoints.root)
    after_the_last_save(folder)
    return StageResult("checkpoint", "hf", step=1)


def after_the_last_save(folder: Path) -> None:
    """Work of a test instead of a stage, which writes to its files again."""


def _write_checkpoint(path: Path) -> None:
    names = ["model/weights", *(f"trainer/shard-{each}" for each in range(NUM_SHARDS))]
    for number, name in enumerate(names):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(bytes([number]) * SHARD_BYTES)
    (path / "model" / "config.json").write_text("{}")


@task
def stage() -> CheckpointArtifact:
    """Stage whose artifact stays on the volume, like that of a plain task."""
    fields = make("tasks.train_sft", "train_sft", config=ClusterConfig(), parents={}, work=train)
    assert Path(fields["directory"].path).joinpath("summary.txt").exists()
    return CheckpointArtifact(**fields)


def run_as_container(prefix: str, attempt: int, out: Path) -> str:
    """The work of a pod in an attempt at an address in the bucket.

    Returns:
        The address of the artifact.
    """
    out.mkdir(parents=True)
    (out / "inputs.pb").write_bytes(LiteralMap({}).to_flyte_idl().SerializeToString())
    with entrypoint.setup_execution(
        raw_output_data_prefix=f"{prefix}/raw/{attempt}",
        checkpoint_path=f"{prefix}/saves/{attempt}",
        prev_checkpoint=f"{prefix}/saves/{attempt - 1}" if attempt else None,
    ) as context:
        entrypoint._dispatch_execute(context, lambda: stage, str(out / "inputs.pb"), str(out))
    error = out / "error.pb"
    assert not error.exists(), error.read_bytes()[-2000:]
    outputs = literals_pb2.LiteralMap.FromString((out / "outputs.pb").read_bytes())
    return str(msgpack.loads(outputs.literals["o0"].scalar.binary.value)["directory"]["path"])


def killed_in_the_middle(prefix: str, out: str) -> None:
    """An attempt that stops after two copies; for a process that is to be killed."""
    import time

    transfer = object_saves._with_retries
    copied: list[str] = []

    def copy_two(address: str, call: functools.partial[object]) -> None:
        is_copy = call.func.__name__.endswith("cp_file")
        if is_copy and len(copied) == 2:
            time.sleep(600)
        transfer(address, call)
        copied.extend([address] * is_copy)
        if is_copy and len(copied) == 2:
            sys.stdout.write("two\n")
            sys.stdout.flush()

    object_saves._NUM_COPIES = object_saves._NUM_STREAMS = 1
    object_saves._with_retries = copy_two  # type: ignore[assignment]
    run_as_container(prefix, 0, Path(out))


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Bucket]:
    close_sessions_at_exit()
    with S3Bucket("127.0.0.1") as started:
        yield started


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often files were hashed, by the ends of their paths."""
    counts: Counter[str] = Counter()
    hash_file = files.hash_file

    def counted(path: Path) -> str:
        counts["/".join(path.parts[-2:])] += 1
        return hash_file(path)

    monkeypatch.setattr(files, "hash_file", counted)
    return counts


@pytest.fixture
def prefix(bucket: S3Bucket, request: pytest.FixtureRequest) -> str:
    return bucket.url(request.node.name.translate(str.maketrans("[]", "--")))


@pytest.fixture
def volume(bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of a pod."""
    environment = {**bucket.environment, "FLYTE_INTERNAL_EXECUTION_ID": "an-execution"}
    for name, value in {**environment, "NEMO_RL_HOME": str(tmp_path / "volume")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "volume"


def artifact_of(volume: Path) -> dict[str, bytes]:
    (folder,) = (volume / "artifacts").iterdir()
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files.list_files(folder)}


def stored(bucket: S3Bucket, address: str) -> dict[str, bytes]:
    address_prefix = f"{bucket.path(address)}/"
    paths = bucket.list(address_prefix)
    return {path.removeprefix(address_prefix): bucket.read(path) or b"" for path in paths}


def num_sent(bucket: S3Bucket, prefix: str) -> int:
    """Bytes that clients have sent to the artifacts of all attempts."""
    raw = bucket.path(f"{prefix}/raw/")
    return sum(size for (_, path), size in bucket.received.items() if path.startswith(raw))


def copied(bucket: S3Bucket, prefix: str) -> list[str]:
    """Names of the copied objects in artifacts, in order."""
    raw = bucket.path(f"{prefix}/raw/")
    return ["/".join(p.split("/")[-2:]) for p in bucket.copied if p.startswith(raw)]


LARGE = sorted(["model/weights", *(f"trainer/shard-{number}" for number in range(NUM_SHARDS))])


@pytest.mark.slow
def test_files_of_the_last_save_are_copied_by_the_server(
    bucket: S3Bucket,
    prefix: str,
    volume: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("tasks", "nemo_rl_core"):  # whose messages a run in this process may keep
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    address = run_as_container(prefix, 0, tmp_path / "out")
    assert address.startswith(f"{prefix}/raw/0/")
    assert stored(bucket, address) == artifact_of(volume)
    assert set(LARGE) < set(copied(bucket, prefix))
    assert num_sent(bucket, prefix) < 100_000
    # A test before this one may have left its Ray runtime to the session; files go through it then.
    assert ("no Ray cluster is left" in caplog.text) is not ray.is_initialized()
    # Another stage reads it and compares the digest of every file.
    downloaded = FlyteDirectory(str(tmp_path / "there"))
    downloaded._remote_source = address
    artifact = CheckpointArtifact(directory=downloaded, stage="train_sft", content_hash="")
    with entrypoint.setup_execution(raw_output_data_prefix=f"{prefix}/raw/other"):
        assert contents(artifact.folder) == artifact_of(volume)


@pytest.mark.slow
def test_files_of_the_last_save_are_hashed_once(
    prefix: str, volume: Path, tmp_path: Path, hashed: Counter[str]
) -> None:
    run_as_container(prefix, 0, tmp_path / "out")
    # By the checkpoint's manifest; small files are hashed again in the artifact.
    assert {hashed[name] for name in LARGE} == {1}
    assert hashed["model/config.json"] == 2


@pytest.mark.slow
def test_changes_after_the_last_save_are_hashed_and_sent(
    bucket: S3Bucket,
    prefix: str,
    volume: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hashed: Counter[str],
) -> None:
    def change(folder: Path) -> None:
        with (folder / LARGE[-1]).open("r+b") as file:
            file.write(b"other")

    monkeypatch.setattr(sys.modules[__name__], "after_the_last_save", change)
    address = run_as_container(prefix, 0, tmp_path / "out")
    made = stored(bucket, address)
    assert made == artifact_of(volume)
    assert made[LARGE[-1]].startswith(b"other")
    digests = json.loads(made["digests.json"])
    assert digests[LARGE[-1]] == hashlib.sha256(made[LARGE[-1]]).hexdigest()
    assert [hashed[name] for name in LARGE] == [1] * NUM_SHARDS + [2]
    assert SHARD_BYTES < num_sent(bucket, prefix) < 2 * SHARD_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["kept", "lost"])
def test_an_attempt_after_a_kill_in_the_middle_copies_again(
    bucket: S3Bucket, prefix: str, volume: Path, tmp_path: Path, disk: str
) -> None:
    call = "import sys; from tests.unit.tasks import test_uploads as t; "
    call += "t.killed_in_the_middle(*sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", call, prefix, str(tmp_path / "first")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[3],
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "two\n"
        os.kill(child.pid, signal.SIGKILL)
    raw = bucket.path(f"{prefix}/raw/0/")
    assert not [path for path in bucket.list(raw) if path.rpartition("/")[2] in LAST]
    assert not (tmp_path / "first" / "outputs.pb").exists()
    made = artifact_of(volume)
    if disk == "lost":
        shutil.rmtree(volume)
    before = len(copied(bucket, prefix))
    assert before == 2
    address = run_as_container(prefix, 1, tmp_path / "second")
    assert stored(bucket, address) == artifact_of(volume)
    if disk == "kept":
        assert artifact_of(volume) == made
    assert sorted(copied(bucket, prefix)[before:])[-len(LARGE) :] == LARGE
    assert num_sent(bucket, prefix) < 100_000


@pytest.mark.slow
def test_where_the_store_cannot_copy_files_are_sent(
    bucket: S3Bucket, prefix: str, volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_saves, "_COPYING", set())
    address = run_as_container(prefix, 0, tmp_path / "out")
    assert stored(bucket, address) == artifact_of(volume)
    assert copied(bucket, prefix) == []
    assert num_sent(bucket, prefix) > len(LARGE) * SHARD_BYTES


def test_small_artifacts_are_left_to_flytekit(prefix: str, volume: Path, tmp_path: Path) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "rows").write_text("rows")
    with entrypoint.setup_execution(raw_output_data_prefix=f"{prefix}/raw"):
        attempt = StageAttempt(SyncCheckpoint(f"{prefix}/saves"))
        directory = uploaded(tmp_path / "artifact", attempt)
    assert (directory.path, directory.remote_source) == (str(tmp_path / "artifact"), None)
