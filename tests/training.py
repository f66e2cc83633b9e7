"""Helpers of tests of complete trainings: comparison of models, and replays."""

import copy
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nemo_rl_core.config.trainer import LoopConfig, RolloutSettings
from nemo_rl_core.data.loader import PromptLoader
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.trainers.base import BaseTrainer
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.types import Completion, Prompt, Rollout


class CountingPolicy:
    """A policy of one number, to which each training step adds one.

    Replaces `Policy`, whose workers need Ray; `tests/workflows` kills and resumes real ones.
    """

    def __init__(self) -> None:
        self.value = 0

    def save_checkpoint(self, path: Path) -> None:
        for part in ("model", "trainer"):
            (path / part).mkdir()
            (path / part / "value.json").write_text(json.dumps(self.value))

    def load_checkpoint(self, path: Path) -> None:
        self.value = json.loads((path / "trainer" / "value.json").read_text())


class Watch(Callback):
    """Records the number and the metrics of every step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.metrics: list[dict[str, float]] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.steps.append(step)
        self.metrics.append(dict(metrics))


def replay(trainer: Any, result: TrainResult, records: Path, work: Path) -> list[dict[str, float]]:
    """Trains again on recorded rollouts from the start of a run, without an engine or a reward.

    Returns:
        Metrics of the steps; the model is in `work`.
    """
    read = Manifest.read(result.folder).parents
    parents = {parent.stage: Path(parent.path) for parent in read}
    (start,) = (Path(each.path) / "model" for each in read if each.kind == "checkpoint")
    work.mkdir()
    spec = RunSpec(
        train=parents["prepare_data train"],
        start=start,
        work=work,
        reference=start,
        replay=records,
    )
    watch = Watch()
    trainer.run(spec, callbacks=[watch])
    assert trainer.sampler is None
    return watch.metrics


def assert_equal_weights(one: Path, other: Path) -> None:
    """Asserts that the models in two training folders are bitwise identical."""
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


class AddConfig(LoopConfig):
    """Steps of two rows each."""

    num_steps: int = 3
    global_batch_size: int = 2
    save_every_num_steps: int = 1


class AddSettings(RolloutSettings):
    """Settings of a trainer of rewards."""

    add: AddConfig = AddConfig()


class Total:
    """A model that is one number."""

    def __init__(self) -> None:
        self.value = 0.0

    def save_checkpoint(self, path: Path) -> None:
        (path / "model").mkdir()
        (path / "model" / "value.json").write_text(json.dumps(self.value))

    def load_checkpoint(self, path: Path) -> None:
        self.value = json.loads((path / "model" / "value.json").read_text())


class AddTrainer(BaseTrainer[AddSettings, AddConfig]):
    """Adds up the rewards of the rows' answers: no workers, but a loop, saves and a scorer."""

    algorithm = "add"
    settings_class = AddSettings

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        self.total, self._scorer = Total(), spec.scorer
        self._batches: PromptLoader[Any] = self._load(spec)

    def _train_step(self, batch: list[Any]) -> dict[str, float]:
        completion = Completion((), (), truncated=False)
        rollouts = [
            Rollout(Prompt("", row["prompt"], (), "", "", "{}"), completion, row["answer"])
            for row in batch
        ]
        scores = self._scorer.score(rollouts) if self._scorer else [0.0] * len(batch)
        rewards = [float(score) for score in scores]  # type: ignore[arg-type]
        self.total.value += sum(rewards)
        return {"reward": sum(rewards) / len(batch), "num_valid_tokens": float(len(batch))}

    def _trained(self) -> Total:
        return self.total

    def _peak_memory_gib(self) -> float:
        return 0.5


class KeepsWeights(Callback):
    """Copies the weights of a policy with `state_dict` after each step.

    Attributes:
        weights: Weights by version.
    """

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_fit_begin(self, trainer: Any) -> None:
        self.on_step_end(trainer, 0, {})

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        policy: Any = trainer.policy
        policy = policy.policy if isinstance(policy, CustomPolicyAdapter) else policy
        self.weights[step] = copy.deepcopy(policy.state_dict())


def assert_logprobs_of_named_versions(
    result: TrainResult, kept: KeepsWeights, model_folder: Path
) -> None:
    """Asserts that each recorded logprob is that of the weights that its version names."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()

    def largest_gap(rollouts: Sequence[Rollout], *, offset: int) -> float:
        gaps = []
        for rollout in rollouts:
            completion = rollout.completion
            (version,) = set(completion.weight_versions)
            model.load_state_dict(kept.weights[version + offset])
            ids = torch.tensor([[*rollout.prompt.token_ids, *completion.token_ids]])
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            of_tokens = logprobs.gather(1, ids[0, 1:, None])[len(rollout.prompt.token_ids) - 1 :, 0]
            gaps.append((of_tokens - torch.tensor(completion.logprobs)).abs().max().item())
        return max(gaps)

    for step in range(1, len(result.metrics) + 1):
        rollouts = RolloutRecords(result.folder / "rollouts").load(step)
        assert largest_gap(rollouts, offset=0) < 1e-4
        assert largest_gap(rollouts, offset=1) > 0.01
