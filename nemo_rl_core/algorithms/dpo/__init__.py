"""Direct preference optimization and its relatives."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl_core.algorithms.dpo.trainer import DPOTrainer
    from nemo_rl_core.trainers.fit.fitting import TrainResult

__all__ = ["dpo_train", "setup"]


def setup(model: str | Path, **overrides: Any) -> "DPOTrainer":
    """Creates a trainer for a model; see `BaseTrainer.from_pretrained`."""
    from nemo_rl_core.algorithms.dpo.trainer import DPOTrainer

    return DPOTrainer.from_pretrained(model, **overrides)


def dpo_train(trainer: "DPOTrainer", dataset: Any, **kwargs: Any) -> "TrainResult":
    """Trains on preference pairs; see `BaseTrainer.fit`."""
    return trainer.fit(dataset, **kwargs)
