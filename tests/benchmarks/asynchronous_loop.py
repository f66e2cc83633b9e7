"""Measures the overhead of the asynchronous loop with an engine and a trainer that only wait.

python -m tests.benchmarks.asynchronous_loop [SECONDS]

The policy takes SECONDS for its optimizer step; the engine and the rewards together take as long
(`tests/waiting.py`). A loop without overhead would be twice as fast as the synchronous one.
`.ci/check_speed.py` checks the ratio.
"""

import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from nemo_rl_core.algorithms import GRPOTrainer
from nemo_rl_core.trainers.callbacks import Callback, Metrics, RunningTrainer
from tests.waiting import Ahead, ByTurns, WaitingEngine, WaitingPolicy, run

NUM_STEPS, NUM_WARM = 12, 3


class Clock(Callback):
    """Records when each step ended."""

    def __init__(self) -> None:
        self.ended_at: list[float] = []

    def on_step_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        self.ended_at.append(time.monotonic())


def step_seconds(
    kind: type[GRPOTrainer], folder: Path, seconds: float, reward_seconds: float, num_steps: int
) -> float:
    """Returns the median step time of a run without its first steps.

    Args:
        kind: Kind of the loop.
        folder: Work folder to create.
        seconds: Seconds per optimizer step, and per step for completions and rewards together.
        reward_seconds: Seconds per step for the rewards.
        num_steps: Steps of the run.
    """

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        time.sleep(reward_seconds)
        return [float(index % 7) for index in range(len(responses))]

    WaitingPolicy.seconds, WaitingEngine.seconds = seconds, seconds - reward_seconds
    clock = Clock()
    run(kind, folder, reward, num_prompts=16, num_steps=num_steps, callbacks=[clock])
    ended = clock.ended_at[NUM_WARM - 1 :]
    return statistics.median(after - before for before, after in pairwise(ended))


def compared(seconds: float, reward_seconds: float, num_steps: int = NUM_STEPS) -> list[float]:
    """Returns seconds per step, synchronous and asynchronous; see `step_seconds`."""
    with tempfile.TemporaryDirectory() as scratch:
        return [
            step_seconds(kind, Path(scratch) / kind.__name__, seconds, reward_seconds, num_steps)
            for kind in (ByTurns, Ahead)
        ]


def main() -> None:
    """Prints seconds per step of both loops."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    for reward_seconds in (0.0, seconds / 2):
        by_turns, ahead = compared(seconds, reward_seconds)
        print(  # noqa: T201
            f"engine {seconds - reward_seconds} s, rewards {reward_seconds} s, trainer {seconds} "
            f"s: synchronous {by_turns:.3f} s a step, asynchronous {ahead:.3f} s, "
            f"{by_turns / ahead:.2f} times"
        )


if __name__ == "__main__":
    main()
