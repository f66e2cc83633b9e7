"""Sides of the rows whose limit is the machine."""

from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.algorithms import GRPOTrainer
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.training import OptimizerConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.models.interfaces import GenerationInterface, PolicyInterface
from nemo_rl_core.telemetry.usage import peak_memory_gib
from nemo_rl_core.trainers.base import RunSpec
from nemo_rl_core.trainers.callbacks import Callback, Metrics, RunningTrainer
from tests.benchmarks.comparison import project_sides
from tests.benchmarks.comparison.bare import Trained
from tests.benchmarks.comparison.inputs import LEARNING_RATE, NUM_THREADS
from tests.benchmarks.comparison.turns import Baton

_LOGPROB = -1.0


class NullPolicy(PolicyInterface):
    """A policy that computes nothing, so that a step is only the controller's work."""

    def train(self, data: BatchedDataDict, loss_fn: Any) -> dict[str, Any]:
        tokens = float(data["token_mask"].sum())
        return {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0, "num_valid_tokens": tokens}

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        return BatchedDataDict({"logprobs": _LOGPROB * data["token_mask"]})


class NullEngine(GenerationInterface):
    """An engine that writes random letters immediately.

    Args:
        num_tokens: Length of the longest completions; the shortest are half as long.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def update_weights(self, policy: Any) -> None:
        """Does nothing."""

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        ids, starts = data["input_ids"], data["input_lengths"]
        count, most = len(ids), self._num_tokens
        lengths = torch.randint(most // 2, most + 1, (count,))
        output = torch.nn.functional.pad(ids, (0, most))
        positions = torch.arange(output.shape[1])
        new = (positions >= starts[:, None]) & (positions < (starts + lengths)[:, None])
        output[new] = torch.randint(100, 120, (int(new.sum()),))
        return BatchedDataDict(
            {
                "output_ids": output,
                "generation_lengths": lengths,
                "unpadded_sequence_lengths": starts + lengths,
                "logprobs": _LOGPROB * new,
                "truncated": torch.zeros(count, dtype=torch.bool),
            }
        )


class _Steps(Callback):
    def __init__(self, baton: Baton, tokens: int) -> None:
        self._baton, self._tokens = baton, tokens

    def on_fit_begin(self, trainer: RunningTrainer) -> None:
        self._baton.wait()

    def on_step_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        tokens = metrics["num_valid_tokens"] + self._tokens
        self._baton.done(tokens=tokens, gib=peak_memory_gib())


def controller(
    baton: Baton,
    *,
    model: Path,
    train: Path,
    work: Path,
    prompts: int,
    group: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
) -> None:
    """Runs full GRPO steps whose engine and policy compute nothing; tokens include prompts."""
    torch.set_num_threads(1)
    trainer = GRPOTrainer(
        NullPolicy(),
        model=str(model),
        generation=NullEngine(max_new_tokens),
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        num_prompts_per_step=prompts,
        num_generations_per_prompt=group,
        num_steps_per_iteration=baton.num_turns,
        save_every_num_steps=10**6,
        loss={"kl": None},
    )
    spec = RunSpec(train=train, start=model, work=work, scorer=project_sides.as_reward())
    trainer.run(spec, callbacks=[_Steps(baton, prompts * group * max_prompt_tokens)])


def memory(baton: Baton, *, model: Path, tokens: int, trains: bool) -> None:
    """Runs a step of the project's backend, or only its logprobs."""
    torch.set_num_threads(NUM_THREADS)
    backend = DTensorBackend()
    backend.setup(TrainingSetup(model, OptimizerConfig(learning_rate=LEARNING_RATE), 8192))

    def work(batch: BatchedDataDict) -> None:
        if trains:
            backend.train_step(batch, NLLLoss())
        else:
            backend.get_logprobs(batch)

    _measure_peak(baton, work, tokens)


def full_logits(baton: Baton, *, model: Path, tokens: int, trains: bool) -> None:
    """Does the same as `memory` with the logits of every position."""
    trained = Trained(model)

    def work(batch: BatchedDataDict) -> None:
        ids = batch["input_ids"]
        with torch.set_grad_enabled(trains):
            logits = trained.model(ids, use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])
        if trains:
            trained.optimizer.zero_grad(set_to_none=True)
            (-logprobs.mean()).backward()
            torch.nn.utils.clip_grad_norm_(trained.model.parameters(), 1.0)
            trained.optimizer.step()

    _measure_peak(baton, work, tokens)


def _measure_peak(baton: Baton, work: Any, tokens: int) -> None:
    def batch(rows: int, length: int) -> BatchedDataDict:
        drawn = torch.randint(3, 250, (rows, length)).tolist()
        return collate(drawn, [[True] * length] * rows)

    work(batch(1, 8))  # allocates the optimizer's moments and the gradients
    full = batch(tokens // 512, 512)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory_gib()
    baton.wait()
    work(full)
    baton.done(gib=peak_memory_gib() - before)
