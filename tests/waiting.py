"""GRPO whose engine and policy wait in place of computing: loops alone, synchronous and ahead.

The trainers, the stream of rollouts, the draws, scoring and records are the real ones. Nothing
needs a core, Ray or weights.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.rollouts.streaming_sampler import StreamingSampler
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.types import Completion
from tests.benchmarks.beside.inputs import model_folder, prompts, saved
from tests.benchmarks.beside.rows_step import TEXT_OF_128
from tests.training import CountingPolicy

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

    def finish_first(self, priority: int) -> None:
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

    def submit(
        self, names: Sequence[int], requests: BatchedDataDict, *, first_version: int = 0
    ) -> None:
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


def run(
    kind: type[GRPOTrainer],
    folder: Path,
    reward: Callable[[list[str], list[str]], list[float]],
    *,
    num_prompts: int,
    num_steps: int,
    callbacks: Sequence[Callback] = (),
) -> None:
    """A run of one of the loops, with 8 completions a prompt.

    Args:
        kind: Of the loop; `Ahead` and its subclasses have a staleness of 1.
        folder: Is made.
        reward: Of the prompts and completions of a step.
        num_prompts: Of a step.
        num_steps: Of the run.
        callbacks: Of the trainer.
    """
    model = model_folder(folder, TEXT_OF_128)
    trainer = kind.from_pretrained(
        model,
        num_prompts_per_step=num_prompts,
        num_generations_per_prompt=8,
        num_steps_per_iteration=num_steps,
        max_prompt_tokens=64,
        save_every_num_steps=10**6,
        loss={"kl": None},
        asynchronous={"max_staleness": 1} if kind.samples_ahead else None,
    )
    train = saved(prompts(num_prompts * 8, 40), model, folder / "rows")
    spec = RunSpec(train=train, start=model, work=folder / "run", scorer=as_scorer(reward))
    trainer.run(spec, callbacks=callbacks)
