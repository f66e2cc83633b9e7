"""CPU seconds to send a save to an object store and to load it: as an archive, and as shards.

    .venv/bin/python tests/benchmarks/saves.py [GIB] [REPETITIONS]

Both sides take turns with the same files of random bytes (four shards in a checkpoint) and moto's
server in a separate process. `archive` is the previous way: the head packs the folder into a tar
file on the volume, uploads it with flytekit, and downloads and unpacks it. `shards` is
`ObjectSaves`: every file from its original path, with the digests that ranks computed in the
background, each compared on arrival.
"""

import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flytekit.configuration import DataConfig, S3Config
from flytekit.core.data_persistence import FileAccessProvider

from nemo_rl_core.checkpoints.manager import CheckpointManager, after_each_save
from nemo_rl_core.checkpoints.object_saves import ObjectSaves
from nemo_rl_core.checkpoints.written_files import WrittenFile, describe_written
from nemo_rl_core.store import files

_NUM_SHARDS = 4
_SERVER = """
import boto3, sys, time
from moto.server import ThreadedMotoServer
import logging
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
endpoint = "http://127.0.0.1:%d" % server.get_host_and_port()[1]
boto3.client("s3", endpoint_url=endpoint, aws_access_key_id="a", aws_secret_access_key="b",
             region_name="us-east-1").create_bucket(Bucket="bucket")
print(endpoint, flush=True)
time.sleep(1e6)
"""


class Shards:
    """Writes random shards and returns their descriptions."""

    def __init__(self, shard_bytes: int, num_shards: int = _NUM_SHARDS) -> None:
        self._bytes, self._num_shards = shard_bytes, num_shards

    def start_checkpoint(self, path: Path) -> None:
        self._path = path
        for number in range(self._num_shards):
            with (path / f"shard-{number}").open("wb") as file:
                for _ in range(self._bytes >> 20):
                    file.write(os.urandom(1 << 20))

    def checkpoint_is_written(self) -> bool:
        return True

    def finish_checkpoint(self) -> dict[str, WrittenFile]:
        return describe_written(self._path, files.list_files(self._path))


def spent_by(work: Callable[[], Any]) -> tuple[float, float]:
    """Returns CPU and wall seconds of this process."""

    def cpu() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    before, start = cpu(), time.monotonic()
    work()
    return cpu() - before, time.monotonic() - start


def _archive(folder: Path, access: FileAccessProvider, address: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        path = Path(aside) / "work.tar"
        with tarfile.open(path, "w") as tar:
            for name in files.list_files(folder):
                tar.add(folder / name, arcname=name)
        access.upload(str(path), address)


def _unpack(folder: Path, access: FileAccessProvider, address: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        access.download(address, f"{aside}/work.tar")
        with tarfile.open(f"{aside}/work.tar") as tar:
            tar.extractall(folder, filter="data")
    assert CheckpointManager(folder / "checkpoints").latest() is not None


def _take_turns(root: Path, access: FileAccessProvider, gib: float, number: int) -> None:
    shards, folder = Shards(int(gib * 2**30) // _NUM_SHARDS), root / "work"
    address = f"s3://bucket/{number}"
    saves = ObjectSaves(access.get_filesystem_for_path(address), address)
    manager = CheckpointManager(folder / "checkpoints")
    published: list[Any] = []
    with after_each_save(published.append):
        manager.start(1, shards).wait()
    names, lies_in = [f"shard-{each}" for each in range(_NUM_SHARDS)], published[0].folder
    spent = {"hashed by ranks": spent_by(lambda: describe_written(lies_in, names))}
    spent["shards, sent"] = spent_by(lambda: saves.save(folder, published[0]))
    spent["archive, sent"] = spent_by(lambda: _archive(folder, access, f"{address}/work.tar"))
    for side in ("shards", "archive"):
        (root / side).mkdir()
    other = ObjectSaves(access.get_filesystem_for_path(address), f"{address}-next")
    other.take_over(address)
    spent["shards, received"] = spent_by(lambda: other.restore(root / "shards"))
    spent["archive, received"] = spent_by(
        lambda: _unpack(root / "archive", access, f"{address}/work.tar")
    )
    for what, (cpu, wall) in spent.items():
        sys.stdout.write(f"{number} {what:<18} {cpu / gib:6.2f} CPU-s {wall / gib:6.1f} s a GiB\n")
        sys.stdout.flush()


@contextmanager
def served() -> Iterator[str]:
    """Yields the address of moto's server in a separate process."""
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.kill()


def access_to(endpoint: str, root: str, number: int) -> FileAccessProvider:
    """Returns the file access that flytekit gives to a container."""
    store = S3Config(endpoint=endpoint, access_key_id="a", secret_access_key="b")
    return FileAccessProvider(f"{root}/sandbox", f"s3://bucket/{number}", DataConfig(s3=store))


def main() -> None:
    """Prints one line per turn and side."""
    gib, repetitions = float((sys.argv[1:] or ["1"])[0]), int((sys.argv[2:] or ["3"])[0])
    with served() as endpoint:
        for number in range(repetitions):
            with tempfile.TemporaryDirectory() as root:
                _take_turns(Path(root), access_to(endpoint, root, number), gib, number)
                shutil.rmtree(f"{root}/work")


if __name__ == "__main__":
    main()
