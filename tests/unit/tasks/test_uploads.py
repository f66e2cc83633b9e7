"""The artifact of a large stage reaches a real S3 server from its saves, also after a kill."""

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
from tasks.platform.attempts import StageAttempt
from tasks.platform.object_stores import close_sessions_at_exit
from tasks.platform.stage import make
from tasks.platform.uploads import uploaded
from tests.workflows.flyte_backend.buckets import S3Bucket

SHARD_BYTES = object_saves.LARGE_BYTES + 1
NUM_SHARDS = 7
"""With the weights just above 64 MiB."""

LAST = ["digests.json", "manifest.json"]


def train(folder: Path) -> StageResult:
    """What a trainer does: saves a step, and moves the last save to where an artifact has it."""
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
    """What a test does in place of a stage that writes to its files once more."""


def _write_checkpoint(path: Path) -> None:
    names = ["model/weights", *(f"trainer/shard-{each}" for each in range(NUM_SHARDS))]
    for number, name in enumerate(names):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(bytes([number]) * SHARD_BYTES)
    (path / "model" / "config.json").write_text("{}")


@task
def stage() -> CheckpointArtifact:
    """Its artifact stays on the volume, as that of a plain task does."""
    fields = make("tasks.train_sft", "train_sft", config=ClusterConfig(), parents={}, work=train)
    assert Path(fields["directory"].path).joinpath("summary.txt").exists()
    return CheckpointArtifact(**fields)


def run_as_container(prefix: str, attempt: int, out: Path) -> str:
    """What a pod does of an attempt at a place of the bucket.

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
    """An attempt that comes no further than two copies; for a process that is to be killed."""
    import time

    copy, copied = object_saves._copy, []

    def copy_two(*given: object) -> None:
        if len(copied) == 2:
            time.sleep(600)
        copied.append(given)
        copy(*given)  # type: ignore[arg-type]
        if len(copied) == 2:
            sys.stdout.write("two\n")
            sys.stdout.flush()

    object_saves._NUM_COPIES = object_saves._NUM_STREAMS = 1
    object_saves._copy = copy_two
    run_as_container(prefix, 0, Path(out))


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Bucket]:
    close_sessions_at_exit()
    with S3Bucket("127.0.0.1") as started:
        yield started


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often files were hashed, by the ends of their paths."""
    found: Counter[str] = Counter()
    hash_file = files.hash_file

    def counted(path: Path) -> str:
        found["/".join(path.parts[-2:])] += 1
        return hash_file(path)

    monkeypatch.setattr(files, "hash_file", counted)
    return found


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
    place = f"{bucket.path(address)}/"
    return {path.removeprefix(place): bucket.read(path) or b"" for path in bucket.list(place)}


def num_sent(bucket: S3Bucket, prefix: str) -> int:
    """Bytes that clients have sent to the artifacts of all attempts."""
    place = bucket.path(f"{prefix}/raw/")
    return sum(size for (_, path), size in bucket.received.items() if path.startswith(place))


def copied(bucket: S3Bucket, prefix: str) -> list[str]:
    """Names of the copied objects in artifacts, in order."""
    place = bucket.path(f"{prefix}/raw/")
    return ["/".join(p.split("/")[-2:]) for p in bucket.copied if p.startswith(place)]


LARGE = sorted(["model/weights", *(f"trainer/shard-{number}" for number in range(NUM_SHARDS))])


def test_what_the_last_save_has_is_copied_by_the_server(
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
    # What another stage makes of it: every file's digest is compared.
    downloaded = FlyteDirectory(str(tmp_path / "there"))
    downloaded._remote_source = address
    artifact = CheckpointArtifact(directory=downloaded, stage="train_sft", content_hash="")
    with entrypoint.setup_execution(raw_output_data_prefix=f"{prefix}/raw/other"):
        assert contents(artifact.folder) == artifact_of(volume)


def test_what_the_last_save_has_is_hashed_once(
    prefix: str, volume: Path, tmp_path: Path, hashed: Counter[str]
) -> None:
    run_as_container(prefix, 0, tmp_path / "out")
    # By the checkpoint's manifest. What is small is hashed again, in the artifact.
    assert {hashed[name] for name in LARGE} == {1}
    assert hashed["model/config.json"] == 2


def test_what_changed_after_the_last_save_is_hashed_and_sent(
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
    place = bucket.path(f"{prefix}/raw/0/")
    assert not [path for path in bucket.list(place) if path.rpartition("/")[2] in LAST]
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
