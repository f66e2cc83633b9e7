"""Most of a step is spent in its phases."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.algorithms import GRPOTrainer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.trainers.callbacks import Callback

PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 18) for b in range(10)]
MOST_OUTSIDE = 0.35
"""Share of a step; `make bench ROWS=overhead` measures that of the default recipe, far lower."""


def length(response: str) -> float:
    return float(len(response))


class Clock(Callback):
    """Records when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.times.append(time.perf_counter())


@pytest.mark.slow
def test_a_step_spends_its_time_within_its_phases(
    session: ClusterSession, tiny_model: Path
) -> None:
    clock = Clock()
    trainer = GRPOTrainer.from_pretrained(
        tiny_model,
        cluster={"num_threads": 1},
        generation={"backend": "hf", "max_new_tokens": 6},
        max_prompt_tokens=16,
        num_prompts_per_step=16,
        num_generations_per_prompt=8,
        num_steps_per_iteration=7,
        save_every_num_steps=100,
    )
    result = trainer.fit(
        PROMPTS, reward_fn=lambda response: float(len(response)), callbacks=[clock]
    )
    reports = MetricsFile(result.folder / "metrics.jsonl").read()
    inside = [
        sum(value for name, value in report.timings.items() if name.endswith("_seconds"))
        for report in reports
    ]
    steps = [later - before for before, later in zip(clock.times, clock.times[1:], strict=False)]
    # The first steps start processes that later ones reuse.
    outside = [1 - within / step for within, step in zip(inside[2:], steps[1:], strict=True)]
    assert statistics.median(outside) < MOST_OUTSIDE, outside
