"""Stragglers in the log of a policy."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from nemo_rl_core.distributed.step_times import (
    NUM_STEPS,
    RankTimes,
    RankTimesLog,
    pop_step_times,
)


class Workers:
    """Ranks that report the times of the test."""

    def __init__(self, own_seconds: Sequence[float | None]) -> None:
        self.world_size, self.num_calls = len(own_seconds), 0
        self._own = own_seconds

    def run_all_workers_single_data(self, method: str, function: Any) -> list[RankTimes | None]:
        assert (method, function) == ("__ray_call__", pop_step_times)
        self.num_calls += 1
        return [
            None if own is None else RankTimes(rank, f"node{rank}", NUM_STEPS, 2.0, own)
            for rank, own in enumerate(self._own)
        ]


def logged(workers: Workers, steps: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    log = RankTimesLog(workers)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="nemo_rl_core"):
        for _ in range(steps):
            log.step_ended()
    return [record.message for record in caplog.records]


def test_ranks_are_asked_every_few_steps_and_the_slow_one_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = Workers([0.5, 0.5, 1.0])
    times, warning, *_ = logged(workers, 2 * NUM_STEPS + 1, caplog)
    assert workers.num_calls == 2
    assert times.endswith("0 2.000 0.500, 1 2.000 0.500, 2 2.000 1.000")
    assert warning == (
        "rank 2 on node2 computes 2.00 times as long as the median rank, 1.00 s per step, over "
        "the last 10 steps"
    )


def test_even_ranks_and_ranks_without_times_are_not_stragglers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (times,) = logged(Workers([0.5, None, 0.6]), NUM_STEPS, caplog)
    assert "0 2.000 0.500, 2 2.000 0.600" in times


def test_a_single_rank_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers([0.5])
    assert logged(workers, NUM_STEPS, caplog) == []
    assert workers.num_calls == 0
