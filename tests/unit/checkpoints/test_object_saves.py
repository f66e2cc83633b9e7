"""A stage's saves at a prefix of a real S3 server, across attempts, kills and damage."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.checkpoints import manager, object_saves
from nemo_rl_core.checkpoints.manager import CheckpointManager, PublishedSave, after_each_save
from nemo_rl_core.checkpoints.object_saves import (
    LARGE_BYTES,
    ObjectSaves,
    StoredFile,
    Transfer,
    deliver,
    is_to_be_restored,
    receive,
)
from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.errors import StoreError, TransferError
from nemo_rl_core.store.files import list_files
from tests.workflows.flyte_backend.buckets import S3Bucket


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Bucket]:
    with S3Bucket("127.0.0.1") as started:
        yield started


@pytest.fixture
def system(bucket: S3Bucket) -> Any:
    return file_system(bucket.environment["FLYTE_AWS_ENDPOINT"])


@pytest.fixture
def prefix(bucket: S3Bucket, request: pytest.FixtureRequest) -> str:
    return bucket.url(request.node.name)


def file_system(endpoint: str) -> Any:
    import s3fs

    return s3fs.S3FileSystem(
        key="a-key",
        secret="its-secret",
        client_kwargs={"endpoint_url": endpoint, "region_name": "us-east-1"},
        skip_instance_cache=True,
    )


def work_folder(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name / "work"
    folder.mkdir(parents=True)
    return folder


def step(folder: Path, saves: ObjectSaves, number: int, **contents: str) -> None:
    """Writes the files of a stage in a step that is saved."""
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(f"{number}\n")

    def write(path: Path) -> None:
        for name, content in {"shard": f"weights {number}", **contents}.items():
            (path / name).write_text(content)

    with after_each_save(lambda published: saves.save(folder, published)):
        CheckpointManager(folder / "checkpoints").save(number, write)


def objects(bucket: S3Bucket, prefix: str) -> set[str]:
    return {path.rpartition("/")[2] for path in bucket.list(bucket.path(f"{prefix}/files/"))}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in list_files(folder)}


def test_an_empty_disk_gets_what_was_saved(
    tmp_path: Path, system: Any, prefix: str, bucket: S3Bucket
) -> None:
    first = work_folder(tmp_path, "first")
    saves = ObjectSaves(system, prefix + "/0")
    step(first, saves, 1, base="frozen")
    step(first, saves, 2, base="frozen")
    # A shard, its manifest, metrics, and the base, which was sent once: nothing of step 1 is left.
    assert len(objects(bucket, prefix + "/0")) == 4

    second = work_folder(tmp_path, "second")
    other = ObjectSaves(system, prefix + "/1")
    assert other.take_over(prefix + "/0")
    assert is_to_be_restored(second)
    other.restore(second)
    assert contents(second) == contents(first)
    assert not is_to_be_restored(second)
    assert CheckpointManager(second / "checkpoints").latest() is not None
    assert objects(bucket, prefix + "/1") == set()  # nothing was copied

    # An attempt that has saved nothing passes on the save that it took over.
    third = work_folder(tmp_path, "third")
    last = ObjectSaves(system, prefix + "/2")
    assert last.take_over(prefix + "/1")
    last.restore(third)
    assert contents(third) == contents(first)
    step(third, last, 3, base="frozen")
    fourth = work_folder(tmp_path, "fourth")
    again = ObjectSaves(system, prefix + "/3")
    assert again.take_over(prefix + "/2")
    again.restore(fourth)
    assert contents(fourth) == contents(third)
    # Of the first attempt's objects only the base is still needed.
    assert len(objects(bucket, prefix + "/0")) == 1
    assert len(objects(bucket, prefix + "/2")) == 3


def test_an_attempt_that_saved_nothing_leaves_nothing(system: Any, prefix: str) -> None:
    assert not ObjectSaves(system, prefix + "/1").take_over(prefix + "/0")


def test_restoring_that_was_killed_is_repeated(tmp_path: Path, system: Any, prefix: str) -> None:
    first, second = work_folder(tmp_path, "first"), work_folder(tmp_path, "second")
    step(first, ObjectSaves(system, prefix), 1)
    saves = ObjectSaves(system, prefix + "/1")
    saves.take_over(prefix)
    saves.restore(second)
    # As if killed between the two moves: metrics are moved, the checkpoint is not.
    (second / ".restoring").mkdir()
    (second / "checkpoints").rename(second / ".restoring" / "checkpoints")
    assert is_to_be_restored(second)
    saves.restore(second)
    assert contents(second) == contents(first)
    assert not is_to_be_restored(second)


def test_a_damaged_object_is_refused(
    tmp_path: Path, system: Any, prefix: str, bucket: S3Bucket
) -> None:
    first, second = work_folder(tmp_path, "first"), work_folder(tmp_path, "second")
    step(first, ObjectSaves(system, prefix), 1)
    save = json.loads(bucket.read(bucket.path(f"{prefix}/save.json")) or b"")
    damaged = save["files"]["checkpoints/step-00000001/shard"]
    bucket.write(bucket.path(damaged["address"]), b"WEIGHTS 1")
    saves = ObjectSaves(system, prefix + "/1")
    saves.take_over(prefix)
    with pytest.raises(StoreError, match=f"{damaged['address']} is damaged"):
        saves.restore(second)
    assert is_to_be_restored(second)


DIGEST = "ab" * 32
ELSEWHERE = {"sha256": DIGEST, "num_bytes": 1, "address": "/etc/passwd"}
NO_DIGEST = {"sha256": "passwd", "num_bytes": 1, "address": "/etc/files/passwd"}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"files": {"../x": {}}}',
        '{"files": {"x": 1}}',
        json.dumps({"files": {"x": ELSEWHERE}}),
        json.dumps({"files": {"x": NO_DIGEST}}),
    ],
)
def test_a_damaged_manifest_is_refused(
    system: Any, prefix: str, bucket: S3Bucket, text: str
) -> None:
    bucket.write(bucket.path(f"{prefix}/save.json"), text.encode())
    with pytest.raises(StoreError, match=r"save\.json is damaged"):
        ObjectSaves(system, prefix + "/1").take_over(prefix)


def test_only_objects_of_saves_are_removed(
    tmp_path: Path, system: Any, prefix: str, bucket: S3Bucket
) -> None:
    """A manifest may name any folder as that of an earlier attempt."""
    other = bucket.path(f"{prefix}-other/files")
    bucket.write(f"{other}/rows.parquet", b"rows")
    bucket.write(f"{other}/{DIGEST}", b"of a save")
    manifest = {"files": {}, "earlier": [f"{prefix}-other"]}
    bucket.write(bucket.path(f"{prefix}/save.json"), json.dumps(manifest).encode())
    saves = ObjectSaves(system, f"{prefix}/1")
    assert saves.take_over(prefix)
    step(work_folder(tmp_path, "first"), saves, 1)
    assert bucket.list(other) == [f"{other}/rows.parquet"]


def test_a_server_that_refuses_ends_the_save_with_its_path(
    tmp_path: Path, prefix: str, system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_saves, "_PAUSES_SECONDS", (0.0,))
    folder = work_folder(tmp_path, "first")
    step(folder, ObjectSaves(system, prefix), 1)
    nowhere = ObjectSaves(system, "s3://no-such-bucket/x")
    with pytest.raises(
        TransferError, match=r"s3://no-such-bucket/x/files/[0-9a-f]{64} was interrupted"
    ):
        step(folder, nowhere, 2)


@pytest.mark.parametrize("num_failures", [2, 3])
def test_interrupted_transfer_is_retried(
    tmp_path: Path, prefix: str, system: Any, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    monkeypatch.setattr(object_saves, "_PAUSES_SECONDS", (0.0, 0.0))
    folder, put, asked = work_folder(tmp_path, "first"), system.put_file, []

    def put_or_break(path: str, address: str) -> None:
        asked.append(address)
        if asked.count(address) <= num_failures:
            raise OSError("connection reset")
        put(path, address)

    monkeypatch.setattr(system, "put_file", put_or_break)
    saves = ObjectSaves(system, prefix)
    if num_failures == 3:
        with pytest.raises(TransferError, match="was interrupted"):
            step(folder, saves, 1)
        return
    step(folder, saves, 1)
    second = work_folder(tmp_path, "second")
    other = ObjectSaves(system, prefix + "/1")
    other.take_over(prefix)
    other.restore(second)
    assert contents(second) == contents(folder)


def test_files_that_their_writers_hashed_are_not_read_again(
    tmp_path: Path, spawn: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """This process publishes a checkpoint of 2 machines' shards and opens none of them."""
    script = """
import sys
from pathlib import Path
from nemo_rl_core.checkpoints.manager import CheckpointManager
from nemo_rl_core.checkpoints.written_files import describe_written
opened = []
class Writer:
    def start_checkpoint(self, folder):
        for name in ("one", "two", "state.json"):
            (folder / name).write_text(name)
        self.written = describe_written(folder, ["one", "two"])
        sys.addaudithook(lambda event, given: event == "open" and opened.append(str(given[0])))
    def finish_checkpoint(self):
        return self.written
save = CheckpointManager(Path(sys.argv[1])).start(1, Writer())
save.wait()
assert any(path.endswith("state.json") for path in opened)
print([path for path in opened if Path(path).name in ("one", "two")], flush=True)
"""
    child = spawn(script, tmp_path)
    assert child.communicate(timeout=60)[0] == "[]\n"
    assert CheckpointManager(tmp_path).latest(verify=True) is not None


def test_a_restored_checkpoint_is_not_hashed_twice(
    tmp_path: Path, system: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = work_folder(tmp_path, "first"), work_folder(tmp_path, "second")
    step(first, ObjectSaves(system, prefix), 1)
    saves = ObjectSaves(system, prefix + "/1")
    saves.take_over(prefix)
    saves.restore(second)
    monkeypatch.setattr(manager.files, "hash_file", None)
    assert CheckpointManager(second / "checkpoints").latest() is not None
    (second / "checkpoints/step-00000001/shard").write_text("shorter")
    assert CheckpointManager(second / "checkpoints").latest() is None


def test_each_file_knows_who_wrote_it(
    tmp_path: Path, system: Any, prefix: str, bucket: S3Bucket
) -> None:
    folder = work_folder(tmp_path, "first")
    saves = ObjectSaves(system, prefix)

    class Writer:
        def start_checkpoint(self, path: Path) -> None:
            (path / "trainer").mkdir()
            for name in ("one", "two"):
                (path / "trainer" / name).write_text(name)

        def checkpoint_is_written(self) -> bool:
            return True

        def finish_checkpoint(self) -> dict[str, WrittenFile]:
            import hashlib

            return {
                f"trainer/{name}": WrittenFile(hashlib.sha256(name.encode()).hexdigest(), 3, node)
                for name, node in (("one", "node 1"), ("two", "node 2"))
            }

    checkpoints = CheckpointManager(folder / "checkpoints", keep_latest=2)
    with after_each_save(lambda published: saves.save(folder, published)):
        checkpoints.start(1, Writer()).wait()
        checkpoints.save(2, lambda path: (path / "x").write_text("x"))
    save = json.loads(bucket.read(bucket.path(f"{prefix}/save.json")) or b"")["files"]
    machines = {name: file["machine"] for name, file in save.items() if file["machine"]}
    assert machines == {
        "checkpoints/step-00000001/trainer/one": "node 1",
        "checkpoints/step-00000001/trainer/two": "node 2",
    }


@pytest.mark.slow
def test_previous_save_is_complete_after_a_kill_while_sending(
    tmp_path: Path, prefix: str, system: Any, bucket: S3Bucket
) -> None:
    script = """
import sys
from pathlib import Path
from tests.unit.checkpoints.test_object_saves import ObjectSaves, file_system, step
folder, prefix, endpoint = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
folder.mkdir(parents=True)
saves = ObjectSaves(file_system(endpoint), prefix)
step(folder, saves, 1)
print("saved", flush=True)
step(folder, saves, 2, **{f"part-{number}": "x" * number for number in range(1, 5000)})
"""
    folder, endpoint = tmp_path / "first/work", bucket.environment["FLYTE_AWS_ENDPOINT"]
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(folder), prefix, endpoint],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "saved\n"
    first = objects(bucket, prefix)
    deadline = time.monotonic() + 120
    while len(objects(bucket, prefix)) < len(first) + 20 and time.monotonic() < deadline:
        assert child.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    cut_off = objects(bucket, prefix)
    assert len(first) < len(cut_off) < 4999
    assert CheckpointManager(folder / "checkpoints").steps() == [2]  # the disk is gone, too

    second = work_folder(tmp_path, "second")
    saves = ObjectSaves(system, prefix + "/1")
    assert saves.take_over(prefix)
    saves.restore(second)
    latest = CheckpointManager(second / "checkpoints").latest()
    assert latest is not None and latest[0] == 1
    assert (latest[1] / "shard").read_text() == "weights 1"
    step(second, saves, 2)
    assert objects(bucket, prefix) == set()  # neither the first save nor the one cut off


@pytest.mark.slow
def test_next_attempt_removes_unneeded_objects_after_a_kill(
    tmp_path: Path, prefix: str, system: Any, bucket: S3Bucket
) -> None:
    step(work_folder(tmp_path, "first"), ObjectSaves(system, prefix + "/0"), 1, base="frozen")
    script = """
import os, signal, sys
from pathlib import Path
from tests.unit.checkpoints.test_object_saves import ObjectSaves, file_system, step
folder, prefix, endpoint = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
system = file_system(endpoint)
saves = ObjectSaves(system, prefix + "/1")
assert saves.take_over(prefix + "/0")
saves.restore(folder)
system.rm = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
step(folder, saves, 2, base="frozen")
"""
    killed, endpoint = work_folder(tmp_path, "killed"), bucket.environment["FLYTE_AWS_ENDPOINT"]
    ended = subprocess.run(
        [sys.executable, "-c", script, str(killed), prefix, endpoint],
        cwd=Path(__file__).resolve().parents[3],
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert system.exists(prefix + "/0/save.json")
    assert len(objects(bucket, prefix + "/0")) == 4

    third = work_folder(tmp_path, "third")
    saves = ObjectSaves(system, prefix + "/2")
    assert saves.take_over(prefix + "/1")
    saves.restore(third)
    assert (third / "checkpoints/step-00000002/shard").read_text() == "weights 2"
    step(third, saves, 3, base="frozen")
    system.invalidate_cache()
    assert not any(system.exists(f"{prefix}/{number}/save.json") for number in (0, 1))
    # Only the base, which every step has.
    assert [len(objects(bucket, f"{prefix}/{number}")) for number in (0, 1, 2)] == [1, 0, 3]
    step(third, saves, 4, base="other")
    assert [len(objects(bucket, f"{prefix}/{number}")) for number in (0, 1, 2)] == [0, 0, 4]


def test_text_appended_during_a_save_belongs_to_a_later_save(
    tmp_path: Path, prefix: str, system: Any
) -> None:
    folder, second = work_folder(tmp_path, "first"), work_folder(tmp_path, "second")
    saves = ObjectSaves(system, prefix)

    def appending(how: Any, system: Any, transfers: Any) -> None:
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write("2\n")  # after it was described, before it is sent
        for each in transfers:
            how(system, [each])

    saves._move = appending
    step(folder, saves, 1)
    other = ObjectSaves(system, prefix + "/1")
    other.take_over(prefix)
    other.restore(second)
    assert (second / "metrics.jsonl").read_text() == "1\n"


def test_published_saves_name_their_folder(tmp_path: Path) -> None:
    seen: list[PublishedSave] = []
    with after_each_save(seen.append):
        CheckpointManager(tmp_path).save(1, lambda path: None)
    assert [(each.folder, dict(each.written)) for each in seen] == [
        (tmp_path / "step-00000001", {})
    ]


@pytest.mark.slow
def test_an_object_is_copied_in_parts(
    tmp_path: Path, prefix: str, system: Any, bucket: S3Bucket
) -> None:
    """As one above 5 GiB has to be; s3fs begins with it at 150 MiB."""
    folder = work_folder(tmp_path, "first")
    saves = ObjectSaves(system, prefix)
    CheckpointManager(folder / "checkpoints").save(1, lambda path: _write_large(path / "shard"))
    shard = folder / "checkpoints/step-00000001/shard"
    saves.save(folder, PublishedSave(shard.parent, {}))
    (known,) = [each for each in saves.copyable_to(system).values() if each.num_bytes > LARGE_BYTES]
    copy = StoredFile(known.sha256, known.num_bytes, f"{prefix}/artifact/shard")
    deliver(system, [Transfer(Path("gone"), copy, copied_from=known.address)])
    assert bucket.copied.count(bucket.path(copy.address)) == 4  # parts of 50 MiB
    receive(system, [Transfer(tmp_path / "back", copy)])  # which compares its digest
    assert (tmp_path / "back").stat().st_size == shard.stat().st_size


def _write_large(path: Path) -> None:
    with path.open("wb") as file:
        for number in range(151):
            file.write(bytes([number]) * 2**20)


def test_only_the_same_store_copies(
    tmp_path: Path, prefix: str, system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    folder = work_folder(tmp_path, "first")
    saves = ObjectSaves(system, prefix)
    step(folder, saves, 1)
    assert len(saves.copyable_to(system)) == 3
    assert saves.copyable_to(fsspec.filesystem("memory")) == {}
    monkeypatch.setattr(type(system), "protocol", ("abfs", "az"))
    assert saves.copyable_to(system) == {}
