"""The project's sides: its trainers on Ray, called the way users call them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.algorithms import AsyncGRPOTrainer, DPOTrainer, GRPOTrainer, SFTTrainer
from nemo_rl_core.algorithms.dpo.reference import reference_logprobs
from nemo_rl_core.algorithms.grpo.config import GRPOSettings
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.training import DTensorTraining, OptimizerConfig
from nemo_rl_core.data.pairs import save_logprobs
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import connect
from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.trainers.base import RunSpec
from nemo_rl_core.trainers.callbacks import Callback, Metrics, RunningTrainer
from tests.benchmarks.comparison.inputs import LEARNING_RATE, NUM_THREADS, reference_settings
from tests.benchmarks.comparison.turns import Baton

_NEVER = 10**6


class TurnsOfSteps(Callback):
    """Ends a turn after every `steps` steps, with the first loss and the seconds of the phases.

    Args:
        baton: Baton of the side.
        steps: Steps per turn.
        work: Work folder of the run, which contains its metrics.
    """

    def __init__(self, baton: Baton, steps: int, work: Path) -> None:
        self._baton, self._steps, self._metrics = baton, steps, work / "metrics.jsonl"
        self._first_loss = float("nan")

    def on_fit_begin(self, trainer: RunningTrainer) -> None:
        self._baton.wait()

    def on_step_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        if step == 1:
            self._first_loss = metrics["loss"]
        if step % self._steps == 0:
            lines = self._metrics.read_text().splitlines()[-self._steps :]
            reports = [json.loads(line) for line in lines]
            sums: dict[str, float] = {}
            for report in reports:
                for name, value in report["timings"].items():
                    sums[name] = sums.get(name, 0.0) + value
            sums.pop("tokens_per_second", None)
            tokens = sum(report["metrics"]["num_valid_tokens"] for report in reports)
            self._baton.done(loss=self._first_loss, tokens=tokens, **sums)


def settings_of(**changes: Any) -> dict[str, Any]:
    """Returns the settings that all sides share, with changes."""
    return {
        "cluster": {"num_threads": NUM_THREADS},
        "dtype": "float32",
        "learning_rate": LEARNING_RATE,
        "save_every_num_steps": _NEVER,
        **changes,
    }


def sft(baton: Baton, *, model: Path, train: Path, work: Path, steps: int, batch: int) -> None:
    """Supervised fine-tuning."""
    trainer = SFTTrainer.from_pretrained(
        model, **settings_of(num_steps=steps * baton.num_turns, global_batch_size=batch)
    )
    spec = RunSpec(train=train, start=model, work=work)
    trainer.run(spec, callbacks=[TurnsOfSteps(baton, steps, work)])


def dpo(baton: Baton, *, model: Path, train: Path, work: Path, steps: int, batch: int) -> None:
    """Runs DPO with cached reference logprobs, like the pipeline."""
    changes = {
        "num_steps_per_iteration": steps * baton.num_turns,
        "num_pairs_per_step": batch,
        "training": {"share_prefixes": True},
    }
    trainer = DPOTrainer.from_pretrained(model, **settings_of(**changes))
    settings = reference_settings()
    cached = work / "reference"
    cached.mkdir(parents=True)
    scored = reference_logprobs(model, train, connect(settings.cluster), settings=settings)
    save_logprobs(scored, cached)
    spec = RunSpec(train=train, start=model, work=work, reference=model, reference_logprobs=cached)
    trainer.run(spec, callbacks=[TurnsOfSteps(baton, steps, work)])


def grpo(
    baton: Baton,
    *,
    model: Path,
    train: Path,
    work: Path,
    steps: int,
    settings: dict[str, Any],
    replay: Path | None = None,
    scorer: Any = None,
) -> None:
    """Runs GRPO, complete or on recorded rollouts; with `asynchronous`, one step ahead."""
    changes = {"num_steps_per_iteration": steps * baton.num_turns, **settings}
    kind = AsyncGRPOTrainer if "asynchronous" in settings else GRPOTrainer
    trainer = kind.from_pretrained(model, **settings_of(**changes))
    spec = RunSpec(
        train=train, start=model, work=work, reference=model, replay=replay, scorer=scorer
    )
    trainer.run(spec, callbacks=[TurnsOfSteps(baton, steps, work)])


def training(
    baton: Baton, *, model: Path, batches: Sequence[BatchedDataDict], steps: int, share: bool
) -> None:
    """Runs the optimizer steps of a policy in its worker."""
    settings = GRPOSettings.model_validate({"cluster": {"num_threads": NUM_THREADS}})
    policy = Policy(
        connect(settings.cluster),
        TrainingSetup(
            model_folder=model,
            optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
            max_tokens_per_microbatch=8192,
            training=DTensorTraining(share_prefixes=share),
        ),
    )
    loss, first = GRPOLossFn(ClippedLoss(kl=None)), float("nan")
    baton.wait()
    for turn in range(baton.num_turns):
        for step in range(turn * steps, (turn + 1) * steps):
            metrics = policy.train(batches[step], loss)
            first = metrics["loss"] if step == 0 else first
        baton.done(loss=first)


def as_reward() -> Any:
    """Returns a scorer that both sides can compute from a completion."""
    return as_scorer(length_reward)


def length_reward(response: str) -> float:
    """Returns a value that differs within a group."""
    return float(sum(response.encode()) % 7)
