"""The check of process groups before the first step, over gloo."""

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed import collective_check
from nemo_rl_core.distributed.collective_check import check_collectives
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import TIMEOUT, join_process_group, rank
from nemo_rl_core.errors import WorkerError

HANGING = 1


def groups_of_pairs() -> dict[str, dist.ProcessGroup]:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return {"pair": pairs[rank() // 2]}


def passes() -> tuple[int, int]:
    join_process_group()
    groups = groups_of_pairs()
    check_collectives(groups)
    first = len(collective_check._checked)
    check_collectives(groups)  # does not sum again
    return first, len(collective_check._checked)


def test_groups_that_work_pass_and_are_checked_once() -> None:
    assert run_ranks(passes, world_size=4) == [(2, 2)] * 4


def with_one_that_hangs() -> str:
    join_process_group()
    if rank() == HANGING:
        time.sleep(8)  # before the check, as in an import, a file system or a debugger
        return ""
    with pytest.raises(WorkerError) as caught:
        check_collectives({}, timeout_seconds=2)
    time.sleep(3)  # the store ends with rank 0
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named() -> None:
    results = run_ranks(with_one_that_hangs, world_size=3)
    for each in (0, 2):
        assert f"rank {HANGING} (unknown host) did not join" in results[each]
        assert "2 of 3 ranks within 2 s" in results[each]


def with_a_sum_that_hangs() -> str:
    """One rank arrives, and hangs in the sum itself."""
    join_process_group()
    if rank() == HANGING:
        ends = collective_check._sum_ends
        collective_check._sum_ends = lambda *_: time.sleep(6) or False  # type: ignore[func-returns-value]
        with pytest.raises(WorkerError):
            check_collectives({}, timeout_seconds=2)
        collective_check._sum_ends = ends
        return ""
    with pytest.raises(WorkerError) as caught:
        check_collectives({}, timeout_seconds=2)
    time.sleep(6)
    return str(caught.value)


@pytest.mark.slow
def test_a_sum_that_does_not_end_names_ranks_and_machines() -> None:
    results = run_ranks(with_a_sum_that_hangs, world_size=2)[0]
    assert "a sum over the group 'world' did not end" in results
    assert f"rank {HANGING} ({socket.gethostname()}, process " in results


def with_a_call_that_hangs() -> str:
    """The first sum of a group creates NCCL's communicator, so the call itself may hang."""
    join_process_group()
    if rank() == HANGING:
        dist.all_reduce = lambda *_, **__: threading.Event().wait()
    with pytest.raises(WorkerError) as caught:
        check_collectives({}, timeout_seconds=2)
    time.sleep(2)  # the store ends with rank 0
    return str(caught.value)


@pytest.mark.slow
def test_call_that_hangs_times_out() -> None:
    for found in run_ranks(with_a_call_that_hangs, world_size=2, timeout_seconds=120):
        assert "a sum over the group 'world' did not end" in found


def with_a_sum_that_fails() -> str:
    join_process_group()

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    dist.all_reduce = refuse
    with pytest.raises(RuntimeError) as caught:
        check_collectives({}, timeout_seconds=2)
    return str(caught.value)


def test_the_error_of_a_sum_is_raised() -> None:
    assert (
        run_ranks(with_a_sum_that_fails, world_size=2) == ["NCCL error: unhandled system error"] * 2
    )


def with_changed_bytes() -> str:
    join_process_group()
    groups = groups_of_pairs()
    ends = collective_check._sum_ends

    def changed(group: Any, values: torch.Tensor, timeout_seconds: float) -> bool:
        is_done = ends(group, values, timeout_seconds)
        if rank() == 3 and dist.get_world_size(group) == 2:
            values[1000] += 1
        return is_done

    collective_check._sum_ends = changed
    try:
        check_collectives(groups)
    except WorkerError as error:
        return str(error)
    return ""


def test_a_sum_with_another_value_is_refused() -> None:
    results = run_ranks(with_changed_bytes, world_size=4)
    assert results[:3] == [""] * 3
    assert "a sum over the group 'pair' is wrong on rank 3" in results[3]
    assert "7 from rank 2" in results[3]
    assert "got: 7 to 8" in results[3]


def timeout_of_the_group(environment: dict[str, str]) -> timedelta:
    os.environ.update(environment)
    join_process_group()
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]


@pytest.mark.slow
def test_timeout_comes_from_the_environment() -> None:
    assert run_ranks(timeout_of_the_group, {}, world_size=2) == [timedelta(seconds=600)] * 2
    error = {TIMEOUT: "37"}
    assert run_ranks(timeout_of_the_group, error, world_size=2) == [timedelta(seconds=37)] * 2


def test_recipe_sets_the_timeout() -> None:
    assert ClusterConfig(collective_timeout_seconds=90).collective_timeout_seconds == 90
    with pytest.raises(ValueError, match="greater than 0"):
        ClusterConfig(collective_timeout_seconds=0)


def groups_of_a_mesh() -> list[str]:
    from nemo_rl_core.backends.training.dtensor.mesh import join_mesh

    join_mesh(DTensorTraining(tensor_parallel_size=2))
    return sorted(name for _, name, ranks in collective_check._checked if len(ranks) > 1)


@pytest.mark.slow
def test_all_groups_of_a_mesh_are_checked() -> None:
    assert run_ranks(groups_of_a_mesh, world_size=4)[0] == ["data", "shard", "tensor", "world"]
