"""Measures the CPU seconds of a stage's process for its artifact, previously and now.

    .venv/bin/python -m tests.benchmarks.artifacts [GIB] [REPETITIONS]

Both sides take turns with the same 128 MiB shards of random bytes, which the last save has sent to
moto's server in a separate process. `head` is the previous way: this process hashes the files and
flytekit uploads them. `store` uses the digests of the save and lets the server copy its objects;
without a Ray cluster, this process requests the copies.
"""

import logging
import sys
import tempfile
from pathlib import Path

from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider

from nemo_rl_core.checkpoints.manager import CheckpointManager, after_each_save
from nemo_rl_core.store.manifest import MANIFEST, write_digests
from nemo_rl_core.store.store import content_digests
from tasks.stage.attempts import StageAttempt
from tasks.stage.container import close_sessions_at_exit
from tasks.stage.uploads import uploaded
from tests.benchmarks.saves import Shards, access_to, served, spent_by

_SHARD_BYTES = 128 * 2**20


def _by_the_head(folder: Path, access: FileAccessProvider) -> None:
    write_digests(folder, content_digests(folder))
    access.put_data(str(folder), access.get_random_remote_directory(), is_multipart=True)


def _by_the_store(folder: Path, attempt: StageAttempt) -> None:
    write_digests(folder, content_digests(folder, attempt.saves.hash_of))
    assert uploaded(folder, attempt).remote_source


def _take_turns(root: Path, access: FileAccessProvider, gib: float, number: int) -> None:
    folder, attempt = root / "work", StageAttempt(SyncCheckpoint(f"s3://bucket/{number}/saves"))
    checkpoints = CheckpointManager(folder / "checkpoints")
    with after_each_save(lambda published: attempt.saves.save(folder, published)):
        checkpoints.start(1, Shards(_SHARD_BYTES, int(gib * 8))).wait()
    checkpoints.path(1).rename(folder / "trainer")
    (folder / MANIFEST).write_text("{}")
    spent = {"head": spent_by(lambda: _by_the_head(folder, access))}
    spent["store"] = spent_by(lambda: _by_the_store(folder, attempt))
    for side, (cpu, wall) in spent.items():
        sys.stdout.write(f"{number} {side:<6} {cpu / gib:6.3f} CPU-s {wall / gib:6.1f} s a GiB\n")
        sys.stdout.flush()


def main() -> None:
    """Prints one line per turn and side."""
    logging.getLogger("tasks").setLevel(logging.ERROR)  # there is no Ray cluster
    gib, repetitions = float((sys.argv[1:] or ["1"])[0]), int((sys.argv[2:] or ["3"])[0])
    close_sessions_at_exit()
    with served() as endpoint:
        for number in range(repetitions):
            with tempfile.TemporaryDirectory() as root:
                access = access_to(endpoint, root, number)
                context = FlyteContextManager.current_context().with_file_access(access)
                with FlyteContextManager.with_context(context):
                    _take_turns(Path(root), access, gib, number)


if __name__ == "__main__":
    main()
