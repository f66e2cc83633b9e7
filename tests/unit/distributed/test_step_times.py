"""Stragglers are found by the time that each rank computes."""

import time

import torch.distributed as dist

from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import join_process_group, rank
from nemo_rl_core.distributed.step_times import RankTimes, pop_step_times, step_time, stragglers


def times(*own: float) -> list[RankTimes]:
    return [RankTimes(rank, f"node{rank // 2}", 10, 9.0, each) for rank, each in enumerate(own)]


def test_straggler_is_named_with_its_machine() -> None:
    assert stragglers(times(1.0, 1.1, 1.4, 0.2)) == []
    assert stragglers(times(1.0, 1.1, 1.8, 1.0)) == [
        "rank 2 on node1 computes 1.80 times as long as the median rank, 1.80 s per step"
    ]
    assert [each[:6] for each in stragglers(times(1.0, 2.0, 1.0, 1.0, 3.0))] == ["rank 4", "rank 1"]


def test_slower_of_two_ranks_is_named() -> None:
    assert len(stragglers(times(1.0, 2.0))) == 1
    assert stragglers(times(1.0)) == stragglers([]) == []


def of_uneven_steps() -> RankTimes | None:
    join_process_group()
    for _ in range(2):
        with step_time():
            end = time.process_time() + (0.4 if rank() == 1 else 0.02)
            while time.process_time() < end:
                pass
            dist.barrier()  # the others wait here
    result = pop_step_times()
    assert pop_step_times() is None
    return result


def test_waiting_for_another_rank_does_not_count() -> None:
    results = run_ranks(of_uneven_steps, world_size=3)
    assert [each.rank for each in results] == [0, 1, 2]
    assert all(each.num_steps == 2 for each in results)
    # All see steps of the same length.
    assert max(each.wall_seconds for each in results) < 2 * min(
        each.wall_seconds for each in results
    )
    (sentence,) = stragglers(results)
    assert sentence.startswith("rank 1 on ")


def test_single_rank_records_nothing() -> None:
    with step_time():
        pass
    assert pop_step_times() is None
