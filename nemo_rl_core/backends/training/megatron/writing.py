"""Background writing of sharded state: copied at once, written by a thread.

Megatron plans the shards and would write them in forked processes. Here a thread writes copies
instead, since a fork of a computing process may deadlock on a held lock. The thread does not
communicate; collectives wait for `finish`, which all ranks call.
"""

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.storage import WriteResult

from nemo_rl_core.checkpoints.written_files import WrittenFile, describe_written
from nemo_rl_core.errors import StoreError

_FORMAT, _VERSION = "torch_dist", 1

_Written = tuple[list[WriteResult], dict[str, WrittenFile]]


class Writing:
    """A save in progress. Creation and `finish` are collectives of all ranks.

    Writes the state at creation, bit-identically; equal states give equal bytes.

    Args:
        folder: An existing path that all ranks share.
        state: This rank's sharded state for Megatron's `dist_checkpointing`.
    """

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self._folder, self._strategy = folder, _CopyingStrategy()
        dist_checkpointing.save(
            state, str(folder), sharded_strategy=self._strategy, async_sharded_save=True
        )
        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[_Written] = executor.submit(self._write)
        executor.shutdown(wait=False)

    def is_done(self) -> bool:
        """Returns True if this rank has nothing left to write, or failed."""
        return self._written.done()

    def _write(self) -> "_Written":
        results = self._strategy.write()
        names = {each.storage_data.relative_path for each in results}
        return results, describe_written(self._folder, names)

    def finish(self) -> dict[str, WrittenFile]:
        """Waits for all ranks, and writes the metadata of all shards.

        Returns:
            The shards that this rank has written, by their names in the folder.

        Raises:
            StoreError: If writing failed on any rank; raised on every rank.
        """
        results: list[Any] = [None] * dist.get_world_size()
        error = self._written.exception()
        own = self._written.result()[0] if error is None else f"{type(error).__name__}: {error}"
        dist.gather_object(own, results if dist.get_rank() == 0 else None)

        def write_metadata() -> None:
            for rank, found in enumerate(results):
                if isinstance(found, str):
                    raise OSError(f"{self._folder}, on rank {rank}: {found}")
            self._strategy.write_metadata(results)
            save_config(CheckpointingConfig(_FORMAT, _VERSION), str(self._folder))

        on_rank_0(write_metadata)
        return self._written.result()[1]


def on_rank_0(action: Callable[[], None]) -> None:
    """Runs a file operation on rank 0 while the others wait.

    Raises:
        StoreError: If the operation fails; raised on every rank.
    """
    error = [""]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as refusal:
            error = [f"{type(refusal).__name__}: {refusal}"[:500]]
    dist.broadcast_object_list(error, src=0)
    if error[0]:
        raise _refused(error[0])


class _CopyingStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's sharded format, one file per rank."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, _VERSION, thread_count=1)
        # Otherwise a process is started for the results of forked writers.
        filesystem_async._results_queue = queue.SimpleQueue()

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> AsyncRequest:
        self._writer, (_, self._metadata, _) = writer, planned
        self._buckets = []
        for file, key, (objects, tensors) in writer.write_buckets:
            assert not objects, objects  # they would be pickled
            copies = [(item, tensor.to("cpu", copy=True)) for item, tensor in tensors]
            self._buckets.append((file, key, (objects, copies)))
        writer.write_buckets = None
        return AsyncRequest(None, (), [])

    def write(self) -> list[WriteResult]:
        """Writes this rank's copies and returns their locations.

        Raises:
            OSError: If writing fails.
        """
        written: list[WriteResult] = []
        for number, bucket in enumerate(self._buckets):
            results: Any = queue.SimpleQueue()
            unfinished: Any = queue.Queue()
            unfinished.put(number)
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                [self._writer.transforms], number, bucket, results, unfinished, use_fsync=True
            )
            _, found = results.get()
            if isinstance(found, Exception):
                raise found
            written += found
        self._buckets.clear()
        return written

    def write_metadata(self, results: list[list[WriteResult]]) -> None:
        """Writes `.metadata`, on the planning rank."""
        # Otherwise it contains the folder and a random id.
        self._writer.storage_meta = lambda: None
        self._writer.finish(self._metadata, results)


def _refused(got: str) -> StoreError:
    return StoreError(
        "the trainer's state could not be written",
        got=got,
        fix="free some space, or point NEMO_RL_HOME at another disk",
    )
