"""Helpers of tests of asynchronous GRPO: rows, settings, and the process of an engine."""

import os
from typing import Any

from nemo_rl_core.algorithms.grpo.data import grpo_batch
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.types import Rollout

LONG = 200
"""Tokens of each completion of the fixture `streaming_engine`."""
NUM_STEPS = 4
ROWS = [{"prompt": f"{n}+{n % 7}=", "answer": str(n + n % 7)} for n in range(10, 34)]
COMMON: dict[str, Any] = {
    "cluster": {"num_threads": 1},
    "generation": {"max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "num_steps_per_iteration": NUM_STEPS,
    "save_every_num_steps": 9,
    "learning_rate": 0.01,
    "loss": {"importance": {"kind": "truncated"}},
}


def batch_of(rollouts: list[Rollout]) -> BatchedDataDict:
    """Returns the batch of GRPO, with a reward of 0 for each rollout."""
    return grpo_batch([rollout.scored(0.0) for rollout in rollouts])


def worker_pid(engine: Generation) -> int:
    """Returns the process id of the engine's first worker."""
    import ray

    worker = engine._workers._workers[0]
    return int(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())))
