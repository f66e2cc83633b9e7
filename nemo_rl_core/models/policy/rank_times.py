"""The times of a policy's ranks in the log, with the names of stragglers."""

import logging

from nemo_rl_core.distributed.step_times import pop_step_times, stragglers
from nemo_rl_core.distributed.worker_group import RayWorkerGroup

_LOG = logging.getLogger(__name__)
NUM_STEPS = 10
"""Number of steps that are averaged: a single slow step does not make a straggler."""


class RankTimesLog:
    """Logs every few steps how long the ranks compute."""

    def __init__(self, workers: RayWorkerGroup) -> None:
        self._workers, self._num_steps = workers, 0

    def step_ended(self) -> None:
        """Counts a step."""
        self._num_steps += 1
        if self._workers.world_size == 1 or self._num_steps % NUM_STEPS:
            return
        answers = self._workers.run_all_workers_single_data("__ray_call__", pop_step_times)
        times = [each for each in answers if each is not None]
        _LOG.info(
            "seconds of a step by rank, with waiting and without: %s",
            ", ".join(f"{t.rank} {t.wall_seconds:.3f} {t.own_seconds:.3f}" for t in times),
        )
        for sentence in stragglers(times):
            _LOG.warning("%s, over the last %d steps", sentence, NUM_STEPS)
