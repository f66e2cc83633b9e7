"""Functions on several ranks of this machine."""

import os
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import join_process_group, rank, world_size
from nemo_rl_core.errors import WorkerError


@pytest.mark.slow
def test_ranks_find_one_another_and_answer_in_order():
    def add_up(base: float) -> tuple[int, float]:
        join_process_group()
        join_process_group()  # again: nothing changes
        total = torch.tensor(base + rank())
        dist.all_reduce(total)
        return rank(), total.item()

    assert run_ranks(add_up, 10.0, world_size=2) == [(0, 21.0), (1, 21.0)]


def test_ranks_listen_on_loopback_only():
    def listening() -> set[str]:
        join_process_group()
        dist.barrier()
        sockets = psutil.Process().net_connections("tcp")
        return {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}

    assert run_ranks(listening, world_size=2) == [{"127.0.0.1"}, {"127.0.0.1"}]


def test_single_rank_is_a_group_of_one():
    def rank_and_size() -> tuple[int, int]:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        join_process_group()
        return dist.get_world_size(), world_size()

    assert run_ranks(rank_and_size, world_size=1) == [(1, 1)]


def test_a_rank_that_raises_is_named_and_the_others_are_not_waited_for():
    def fail() -> None:
        join_process_group()
        if rank() == 1:
            raise ValueError("no such thing")
        dist.barrier()

    with pytest.raises(WorkerError, match=r"rank 1 raised(.|\n)*no such thing"):
        run_ranks(fail, world_size=2)


def test_a_rank_that_dies_is_named():
    def die() -> None:
        if rank() == 0:
            os._exit(3)

    with pytest.raises(WorkerError, match="rank 0 died without an answer"):
        run_ranks(die, world_size=2)


def test_ranks_have_the_environment_of_each_call(monkeypatch: pytest.MonkeyPatch):
    def values() -> list[str | None]:
        return [os.environ.get(name) for name in ("OF_FIRST", "OF_BOTH", "OF_SECOND")]

    monkeypatch.setenv("OF_FIRST", "1")
    monkeypatch.setenv("OF_BOTH", "1")
    assert run_ranks(values, world_size=1) == [["1", "1", None]]
    monkeypatch.delenv("OF_FIRST")
    monkeypatch.setenv("OF_BOTH", "2")
    monkeypatch.setenv("OF_SECOND", "2")
    assert run_ranks(values, world_size=1) == [[None, "2", "2"]]


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended():
    def hang() -> None:
        if rank() == 0:
            time.sleep(100)

    with pytest.raises(WorkerError, match=r"ranks \[0\] did not end within 3 s"):
        run_ranks(hang, world_size=2, timeout_seconds=3)
