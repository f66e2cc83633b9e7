"""GRPO with an engine and a policy that wait instead of computing, synchronous and asynchronous.

The trainers, rollout streams, draws, scoring and records are the real ones. No cores, Ray or
weights are needed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.data.pretrained import decoded, load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.models.generation.remote_completions import RemoteCompletions
from nemo_rl_core.models.generation.streaming import KeptCompletion
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.rollouts.streaming_sampler import StreamingSampler
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.types import Completion
from tests.benchmarks.comparison.inputs import model_folder, prompts, saved
from tests.benchmarks.comparison.rows_step import TEXT_OF_128
from tests.training import CountingPolicy

TOKENS = (5, 6, 7, 8)
LOGPROB = -0.5


class WaitingEngine:
    """Completes requests step by step, each with a fixed delay.

    Attributes:
        seconds: Seconds for the completions of one step.
    """

    seconds = 0.5
    num_restarts, agreement, keeps_completions = 0, 1.0, False

    def __init__(self, _: Any, setup: GenerationSetup, **__: Any) -> None:
        self._text = decoded(load_tokenizer(setup.model_folder), TOKENS)
        self._done_at: dict[int, float] = {}
        self._prompts: dict[int, list[int]] = {}
        self._versions: dict[int, int] = {}
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
        for row, (name, length) in enumerate(
            zip(names, requests["input_lengths"].tolist(), strict=True)
        ):
            self._prompts[name] = requests["input_ids"][row, :length].tolist()

    def poll(self, *, wait_seconds: float) -> list[tuple[int, KeptCompletion]]:
        next_at = min(self._done_at.values(), default=float("inf"))
        time.sleep(max(0.0, min(next_at - time.monotonic(), wait_seconds)))
        done = [name for name, at in self._done_at.items() if at <= time.monotonic()]
        for name in done:
            del self._done_at[name]
            self._versions[name] = self._version
        size = len(TOKENS)
        return [
            (name, KeptCompletion(0, len(self._prompts[name]) + size, size, truncated=False))
            for name in done
        ]

    def take_remotely(self, kept: Mapping[int, KeptCompletion]) -> RemoteCompletions:
        logprobs = (LOGPROB,) * len(TOKENS)
        completions = [
            Completion(TOKENS, logprobs, False, (), (self._versions[name],) * len(TOKENS))
            for name in kept
        ]
        prompts = [self._prompts[name] for name in kept]
        return RemoteCompletions.of(prompts, completions, [self._text] * len(kept), streams=True)


class WaitingSampler(Sampler):
    """Sampler of the synchronous loop."""

    _engine_class: Any = WaitingEngine


class WaitingStreamingSampler(StreamingSampler):
    """Sampler of the asynchronous loop."""

    _engine_class: Any = WaitingEngine


class WaitingPolicy(CountingPolicy):
    """Waits for a fixed time in each optimizer step.

    Attributes:
        seconds: Seconds for one step.
    """

    seconds = 0.5
    compute, splits_steps = CustomPolicyAdapter.compute, False

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
    """Runs one of the loops, with 8 completions per prompt.

    Args:
        kind: Class of the loop; `Ahead` and its subclasses have a staleness of 1.
        folder: Work folder to create.
        reward: Reward function of the prompts and completions of a step.
        num_prompts: Prompts per step.
        num_steps: Steps of the run.
        callbacks: Callbacks of the trainer.
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
