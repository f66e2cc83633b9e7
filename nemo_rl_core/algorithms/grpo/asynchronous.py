"""GRPO with an engine that samples ahead while the model trains."""

from contextlib import ExitStack

import torch

from nemo_rl_core.algorithms.grpo.trainer import GRPOTrainer, drawn_metrics
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.batch import staleness_metrics
from nemo_rl_core.trainers.base import Job
from nemo_rl_core.types import Prompt, Rollout


class AsyncGRPOTrainer(GRPOTrainer):
    """As `GRPOTrainer`, but no step waits for its rollouts to begin.

    Steps are trained in order on the prompts that `GRPOTrainer` would give them, so with
    `max_staleness: 0` the weights are equal to the bit. Beyond that, which weights drew which token
    depends on time; every token's version is recorded, and `replay` repeats the run from the
    records to the bit.
    """

    def _set_up(self, job: Job, resources: ExitStack) -> None:
        super()._set_up(job, resources)
        self._last_begun = 0
        self._last = self._steps(job).last
