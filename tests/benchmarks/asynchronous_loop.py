"""What the asynchronous loop costs itself: engine and trainer wait in place of computing.

python -m tests.benchmarks.asynchronous_loop [SECONDS]

The trainers, the stream of rollouts, the draws, scoring and records are the real ones; the policy
takes SECONDS for its optimizer step, the engine and the rewards as long together, and none of them
needs a core, Ray or weights. So a loop without any cost of its own would be twice as fast as the
synchronous one.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.rollouts.stream import StreamingSampler
from nemo_rl_core.trainers.callbacks import Callback, Metrics, RunningTrainer
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.types import Completion
from tests.benchmarks.beside.inputs import model_folder, prompts, saved
from tests.benchmarks.beside.rows_step import TEXT_OF_128
from tests.training import CountingPolicy

NUM_STEPS, NUM_WARM = 12, 3
TOKENS = (5, 6, 7, 8)
LOGPROB = -0.5


class WaitingEngine:
    """Completes what it is asked, step after step, as late as it is told.

    Attributes:
        seconds: For the completions of one step.
    """

    seconds = 0.5
    num_restarts, agreement, keeps_completions = 0, 1.0, False

    def __init__(self, *_: Any, **__: Any) -> None:
        self._done_at: dict[int, float] = {}
        self._busy_until, self._version = 0.0, 0

    def update_weights(self, policy: Any, *, weight_version: int = 0, **_: Any) -> None:
        self._version = weight_version

    def check_update(self) -> None:
        pass

    def prepare_for_generation(self) -> None:
        pass

    def finish_generation(self, **_: Any) -> None:
        pass

    def peak_memory_gib(self) -> float:
        return 0.0

    def generate(self, batch: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        time.sleep(self.seconds)
        ends = batch["input_lengths"] + len(TOKENS)
        output_ids = torch.zeros(batch.size, int(ends.max()), dtype=torch.long)
        for row, end in enumerate(ends.tolist()):
            output_ids[row, end - len(TOKENS) : end] = torch.tensor(TOKENS)
        return BatchedDataDict(
            {
                "output_ids": output_ids,
                "unpadded_sequence_lengths": ends,
                "generation_lengths": torch.full((batch.size,), len(TOKENS)),
                "logprobs": torch.full(output_ids.shape, LOGPROB),
                "truncated": torch.zeros(batch.size, dtype=torch.bool),
            }
        )

    def submit(self, names: Sequence[int], requests: BatchedDataDict) -> None:
        self._busy_until = max(time.monotonic(), self._busy_until) + self.seconds
        self._done_at |= dict.fromkeys(names, self._busy_until)

    def poll(self, *, wait_seconds: float) -> list[tuple[int, Completion]]:
        next_at = min(self._done_at.values(), default=float("inf"))
        time.sleep(max(0.0, min(next_at - time.monotonic(), wait_seconds)))
        done = [name for name, at in self._done_at.items() if at <= time.monotonic()]
        for name in done:
            del self._done_at[name]
        logprobs, versions = (LOGPROB,) * len(TOKENS), (self._version,) * len(TOKENS)
        made = Completion(TOKENS, logprobs, truncated=False, weight_versions=versions)
        return [(name, made) for name in done]


class WaitingSampler(Sampler):
    """Of the synchronous loop."""

    _engine_class: Any = WaitingEngine


class WaitingStreamingSampler(StreamingSampler):
    """Of the asynchronous one."""

    _engine_class: Any = WaitingEngine


class WaitingPolicy(CountingPolicy):
    """Takes as long for its optimizer step as it is told.

    Attributes:
        seconds: For one step.
    """

    seconds = 0.5

    def get_logprobs(self, batch: BatchedDataDict) -> BatchedDataDict:
        return BatchedDataDict({"logprobs": batch["generation_logprobs"]})

    def train(self, batch: BatchedDataDict, loss_fn: Any) -> dict[str, float]:
        time.sleep(self.seconds)
        return {"loss": 0.0, "num_valid_tokens": float(batch["token_mask"].sum())}

    def peak_memory_gib(self) -> float:
        return 0.0


class ByTurns(GRPOTrainer):
    """The synchronous loop."""

    sampler_class = WaitingSampler

    def _make_policy(self, spec: RunSpec) -> Any:
        return WaitingPolicy()


class Ahead(AsyncGRPOTrainer):
    """The asynchronous loop."""

    sampler_class = WaitingStreamingSampler

    def _make_policy(self, spec: RunSpec) -> Any:
        return WaitingPolicy()


class Clock(Callback):
    """Notes when each step has ended."""

    def __init__(self) -> None:
        self.ended_at: list[float] = []

    def on_step_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        self.ended_at.append(time.monotonic())


def step_seconds(kind: type[GRPOTrainer], folder: Path, reward_seconds: float) -> float:
    """The median of a run's steps but the first ones.

    Args:
        kind: Of the loop.
        folder: Is made.
        reward_seconds: For the rewards of a step.
    """

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        time.sleep(reward_seconds)
        return [float(place % 7) for place in range(len(responses))]

    model = model_folder(folder, TEXT_OF_128)
    trainer = kind.from_pretrained(
        model,
        num_prompts_per_step=16,
        num_generations_per_prompt=8,
        num_steps_per_iteration=NUM_STEPS,
        max_prompt_tokens=64,
        save_every_num_steps=10**6,
        loss={"kl": None},
        asynchronous={"max_staleness": 1} if kind is Ahead else None,
    )
    rows = prompts(16 * 8, 40)
    scorer, clock = as_scorer(reward), Clock()
    work = folder / "run"
    spec = RunSpec(train=saved(rows, model, folder / "rows"), start=model, work=work, scorer=scorer)
    trainer.run(spec, callbacks=[clock])
    ended = clock.ended_at[NUM_WARM - 1 :]
    return statistics.median(after - before for before, after in pairwise(ended))


def main() -> None:
    """Prints seconds a step of both loops."""
    seconds = WaitingPolicy.seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    with tempfile.TemporaryDirectory() as scratch:
        for reward_seconds in (0.0, seconds / 2):
            WaitingEngine.seconds = seconds - reward_seconds
            found = [
                step_seconds(
                    kind, Path(scratch) / f"{kind.__name__}-{reward_seconds}", reward_seconds
                )
                for kind in (ByTurns, Ahead)
            ]
            print(  # noqa: T201
                f"engine {WaitingEngine.seconds} s, rewards {reward_seconds} s, trainer {seconds} "
                f"s: synchronous {found[0]:.3f} s a step, asynchronous {found[1]:.3f} s, "
                f"{found[0] / found[1]:.2f} times"
            )


if __name__ == "__main__":
    main()
