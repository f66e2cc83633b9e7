"""What tests of whole trainings share: models held against each other, and replays."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.trainers.base import RunSpec
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.fitting import TrainResult


class Watch(Callback):
    """Keeps the number and the figures of every step that is run."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.metrics: list[dict[str, float]] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.steps.append(step)
        self.metrics.append(dict(metrics))


def replay(trainer: Any, result: TrainResult, records: Path, work: Path) -> list[dict[str, float]]:
    """Trains again where a run began, on rollouts: no engine runs, and no reward.

    Returns:
        The figures of the steps; the model lies in `work`.
    """
    parents = {parent.stage: Path(parent.path) for parent in Manifest.read(result.folder).parents}
    start = parents["prepare_model"] / "model"
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
    """To the bit, of the models in two folders of trainings."""
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
