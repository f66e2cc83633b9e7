"""Background writing of sharded state, which is copied immediately and written by a thread.

Megatron would write it in forked processes, but a fork of a computing process may deadlock on a
lock of another thread. The thread does not communicate; collectives happen in `finish`.
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


class PendingWrite:
    """A save in progress; its creation and `finish` are collectives of all ranks.

    Saves exactly the state at the creation of this object; equal states give equal files.
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
        """Returns True if this rank has finished writing or failed."""
        return self._written.done()

    def _write(self) -> "_Written":
        results = self._strategy.write()
        names = {each.storage_data.relative_path for each in results}
        return results, describe_written(self._folder, names)

    def finish(self) -> dict[str, WrittenFile]:
        """Waits for all ranks and writes the metadata of all shards; returns this rank's shards."""
        results: list[Any] = [None] * dist.get_world_size()
        error = self._written.exception()
        result = self._written.result()[0] if error is None else f"{type(error).__name__}: {error}"
        dist.gather_object(result, results if dist.get_rank() == 0 else None)

        def write_metadata() -> None:
            for rank, rank_result in enumerate(results):
                if isinstance(rank_result, str):
                    raise OSError(f"{self._folder}, on rank {rank}: {rank_result}")
            self._strategy.write_metadata(results)
            save_config(CheckpointingConfig(_FORMAT, _VERSION), str(self._folder))

        on_rank_0(write_metadata)
        return self._written.result()[1]


def on_rank_0(action: Callable[[], None]) -> None:
    """Runs a file operation on rank 0 while others wait; a failure raises `StoreError` on all."""
    error = [""]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as failure:
            error = [f"{type(failure).__name__}: {failure}"[:500]]
    dist.broadcast_object_list(error, src=0)
    if error[0]:
        raise StoreError(
            "the trainer's state could not be written",
            got=error[0],
            fix="free some space, or point NEMO_RL_HOME at another disk",
        )


class _CopyingStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(_FORMAT, _VERSION, thread_count=1)
        # Otherwise Megatron starts a process for the results of forked writers.
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
        """Writes this rank's copies and returns their locations."""
        written: list[WriteResult] = []
        for number, bucket in enumerate(self._buckets):
            results: Any = queue.SimpleQueue()
            unfinished: Any = queue.Queue()
            unfinished.put(number)
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                [self._writer.transforms], number, bucket, results, unfinished, use_fsync=True
            )
            _, result = results.get()
            if isinstance(result, Exception):
                raise result
            written += result
        self._buckets.clear()
        return written

    def write_metadata(self, results: list[list[WriteResult]]) -> None:
        # Otherwise the metadata contains the folder and a random id.
        self._writer.storage_meta = lambda: None
        self._writer.finish(self._metadata, results)
