"""What the asynchronous loop costs itself: engine and trainer wait in place of computing.

python -m tests.benchmarks.asynchronous_loop [SECONDS]

The policy takes SECONDS for its optimizer step, the engine and the rewards as long together
(`tests/waiting.py`). So a loop without any cost of its own would be twice as fast as the
synchronous one. `.ci/check_speed.py` holds the ratio.
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
    """Notes when each step has ended."""

    def __init__(self) -> None:
        self.ended_at: list[float] = []

    def on_step_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        self.ended_at.append(time.monotonic())


def step_seconds(
    kind: type[GRPOTrainer], folder: Path, seconds: float, reward_seconds: float, num_steps: int
) -> float:
    """The median of a run's steps but the first ones.

    Args:
        kind: Of the loop.
        folder: Is made.
        seconds: For an optimizer step, and for completions and rewards together.
        reward_seconds: For the rewards of a step.
        num_steps: Of the run.
    """

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        time.sleep(reward_seconds)
        return [float(place % 7) for place in range(len(responses))]

    WaitingPolicy.seconds, WaitingEngine.seconds = seconds, seconds - reward_seconds
    clock = Clock()
    run(kind, folder, reward, num_prompts=16, num_steps=num_steps, callbacks=[clock])
    ended = clock.ended_at[NUM_WARM - 1 :]
    return statistics.median(after - before for before, after in pairwise(ended))


def compared(seconds: float, reward_seconds: float, num_steps: int = NUM_STEPS) -> list[float]:
    """Seconds a step, synchronous and asynchronous; the arguments are those of `step_seconds`."""
    with tempfile.TemporaryDirectory() as scratch:
        return [
            step_seconds(kind, Path(scratch) / kind.__name__, seconds, reward_seconds, num_steps)
            for kind in (ByTurns, Ahead)
        ]


def main() -> None:
    """Prints seconds a step of both loops."""
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
