"""Weights that all ranks gather and rank 0 writes: no rank gets ahead of the disk."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl_core.checkpoints import tensors as tensors_module
from nemo_rl_core.checkpoints.tensors import load_tensors, save_weights
from nemo_rl_core.distributed.gathered_writes import write_on_rank_0
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import join_process_group, rank
from nemo_rl_core.errors import StoreError

NAMES = [f"weight_{index:02d}" for index in range(12)]
WRITE_SECONDS = 0.4


class Enqueued:
    """Gathers as NCCL runs them: a rank enqueues one and continues, and each waits for all ranks.

    Pending are those that rank 0 has not joined.
    """

    def __init__(self) -> None:
        self.most_pending = 0
        self._store = dist.distributed_c10d._get_default_store()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, name in enumerate(NAMES):
            value = torch.full((4,), float(index * dist.get_world_size() * (rank() + 1)))
            work = dist.all_reduce(value, async_op=True)
            joined = self._store.add("joined", int(rank() == 0))
            self.most_pending = max(self.most_pending, index + 1 - joined)
            if rank() == 0:
                work.wait()  # the copy to the host waits too
            yield name, value


@pytest.mark.slow
def test_no_gather_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_rank() -> tuple[int, list[int], int]:
        join_process_group(timeout_seconds=60.0)
        gathers, begun = Enqueued(), []
        save = tensors_module.save_tensors
        counter = dist.distributed_c10d._get_default_store()
        stream = gathers.named_weights

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for named in stream():
                if rank() == 1:
                    counter.add("begun", 1)
                yield named

        def slow(*args: Any, **kwargs: Any) -> None:
            time.sleep(WRITE_SECONDS)  # the other ranks could get ahead meanwhile
            begun.append(counter.add("begun", 0))
            save(*args, **kwargs)

        monkeypatch.setattr(tensors_module, "save_tensors", slow)
        write_on_rank_0(counted(), lambda each: save_weights(tmp_path, each, max_shard_bytes=48))
        return gathers.most_pending, begun, len(list(tmp_path.glob("*.safetensors")))

    (_, begun, _), *others = run_ranks(on_rank, world_size=3)
    # Files of three tensors; a fourth one has shown rank 0 that the file is full.
    assert len(begun) == 4
    assert all(found <= most for found, most in zip(begun, (4, 7, 10, 12), strict=True)), begun
    assert [pending <= 1 for pending, *_ in others] == [True, True]
    assert [num_files for *_, num_files in others] == [4, 4]  # they return after the last write
    written: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        written |= load_tensors(path)
    assert {name: float(each[0]) for name, each in written.items()} == {
        name: 3.0 * index * (1 + 2 + 3) for index, name in enumerate(NAMES)
    }


def test_a_write_that_fails_ends_all_ranks() -> None:
    def on_rank() -> str:
        join_process_group(timeout_seconds=60.0)

        def write(named: Any) -> None:
            for name, _ in named:
                if name == NAMES[5]:
                    raise StoreError("the disk is full")

        with pytest.raises(StoreError) as refused:
            write_on_rank_0(Enqueued().named_weights(), write)
        return refused.value.problem

    first, *others = run_ranks(on_rank, world_size=3, timeout_seconds=60)
    assert first == "the disk is full"
    assert others == ["rank 0 could not write the model"] * 2


def test_single_rank_writes_its_tensors(tmp_path: Path) -> None:
    write_on_rank_0([("a", torch.ones(2))], lambda each: save_weights(tmp_path, each))
    assert load_tensors(tmp_path / "model.safetensors")["a"].tolist() == [1.0, 1.0]
