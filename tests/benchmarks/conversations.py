"""Measures GRPO steps on conversations on Ray: seconds, and CPU time of the controller.

`python -m tests.benchmarks.conversations` runs 24 steps of 128 conversations of four turns,
synchronously and asynchronously, on a Qwen2 of two layers of 128 with random weights: one vLLM
engine and one rank, one thread per process. The medians of deployment/SCALE.md are of the last 20
steps.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.distributed import session as sessions
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.trainers.callbacks import Callback, Metrics, RunningTrainer

NUM_TURNS, NUM_STEPS, NUM_WARMUP = 4, 24, 4
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]
SETTINGS: dict[str, Any] = {
    "cluster": {"num_threads": 1},
    "generation": {"max_new_tokens": 16, "kv_cache_gib": 1, "max_num_seqs": 128},
    "rollouts": {"max_turns": 6, "max_rollout_tokens": 64},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 16,
    "num_generations_per_prompt": 8,
    "num_steps_per_iteration": NUM_STEPS,
    "save_every_num_steps": 100,
    "learning_rate": 1e-4,
}
KINDS: dict[str, tuple[type[GRPOTrainer], dict[str, Any]]] = {
    "synchronous": (GRPOTrainer, {}),
    "asynchronous": (
        AsyncGRPOTrainer,
        {"asynchronous": {"max_staleness": 1}, "loss": {"importance": {"kind": "truncated"}}},
    ),
}


class Chat:
    """Answers `1=` to turns that stop at a digit, four times."""

    first_stop_strings = tuple("0123456789")

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        turns = [log[-1]["content"] for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1="}] * len(turns),
            metadata=list(metadata),
            next_stop_strings=[list(self.first_stop_strings)] * len(turns),
            rewards=torch.tensor([text.count("7") + 0.1 * len(text) for text in turns]),
            terminateds=torch.tensor([len(log) == 2 * NUM_TURNS for log in message_log_batch]),
        )


class _Measured(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def on_step_begin(self, trainer: RunningTrainer, step: int) -> None:
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        wall, cpu = self._began
        self.seconds.append(time.perf_counter() - wall)
        self.cpu_seconds.append(time.process_time() - cpu)


def main() -> None:
    """Prints one line per kind."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["NEMO_RL_HOME"] = scratch
        model = Path(scratch) / "model"
        size = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 4}
        materialize(ModelFromConfig(**size), model, seed=0)
        for kind, (trainer, options) in KINDS.items():
            measured = _Measured()
            made = trainer.from_pretrained(model, **SETTINGS, **options)
            made.fit(ROWS, reward_fn=Chat(), callbacks=[measured], name=kind)
            seconds, cpu = (
                statistics.median(each[NUM_WARMUP:])
                for each in (measured.seconds, measured.cpu_seconds)
            )
            Console().print(f"{kind}: {seconds:.2f} s, {1e3 * cpu:.0f} CPU-ms of the controller")
            sessions.shutdown()  # so that no engine of the other kind remains


if __name__ == "__main__":
    main()
