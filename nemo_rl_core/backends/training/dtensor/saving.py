"""The checkpoints of the backend `dtensor`: with the model for others, or with shards alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nemo_rl_core.backends.training.dtensor.checkpoint import (
    TrainerState,
    in_checkpoint,
    written_by_rank_0,
)
from nemo_rl_core.backends.training.dtensor.float8 import refresh_scales, unwrapped
from nemo_rl_core.backends.training.dtensor.loading import called
from nemo_rl_core.backends.training.dtensor.shards import fill_from_folder
from nemo_rl_core.checkpoints.weight_files import distinct
from nemo_rl_core.checkpoints.weights import refuse_wrong_weights
from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.data.pretrained import load_tokenizer

if TYPE_CHECKING:
    from nemo_rl_core.backends.training.base import TrainingSetup
    from nemo_rl_core.backends.training.dtensor.lora import Adapters
    from nemo_rl_core.backends.training.dtensor.packed import PackedModel
    from nemo_rl_core.backends.training.offload import OffloadedState


class DTensorSaving:
    """What a rank saves and loads; a part of `DTensorBackend`.

    `model/` has the weights in transformers' layout. They are gathered for it tensor by tensor, and
    rank 0 writes them before training continues. A checkpoint that a run only resumes from needs no
    such folder: its weights are in `trainer/`, in shards, as the optimizer's state is.
    """

    _setup: "TrainingSetup"
    _memory: "OffloadedState"
    _policy: "PackedModel"
    _adapters: "Adapters | None"
    _trainer_state: TrainerState
    _num_updates: int

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole weights under transformers' names."""
        raise NotImplementedError

    def save_checkpoint(self, path: Path) -> None:
        """Writes `model/` (transformers layout) and `trainer/` (optimizer, random state)."""
        self.start_checkpoint(path)
        self.finish_checkpoint()

    def start_checkpoint(self, path: Path) -> None:
        """As `save_checkpoint`, but the trainer's state is written while training continues."""
        self._memory.restore("weights", "optimizer")
        source = self._setup.model_folder
        self._policy.save(path / "model", source, load_tokenizer(source), self.named_weights())
        (path / "trainer").mkdir(exist_ok=True)
        if self._adapters:
            self._adapters.save(path / "trainer")
        self._start_saving(path, model={})

    def start_sharded_checkpoint(self, path: Path) -> None:
        """As `start_checkpoint`, without `model/`: nothing is gathered, weights are shards too."""
        self._memory.restore("weights", "optimizer")
        (path / "trainer").mkdir(exist_ok=True)
        self._start_saving(path, model={} if self._adapters else self._model_state())

    def _start_saving(self, path: Path, *, model: Mapping[str, torch.Tensor]) -> None:
        if self._adapters:
            self._adapters.save_base(path / "trainer")
        self._trainer_state.start_saving(
            path / "trainer",
            num_updates=self._num_updates,
            model=model,
            beside=written_by_rank_0(path),
        )

    def _model_state(self) -> dict[str, torch.Tensor]:
        return {name: unwrapped(tensor) for name, tensor in distinct(self._policy.model)}

    def checkpoint_is_written(self) -> bool:
        """Returns True if `finish_checkpoint` would not wait."""
        return self._trainer_state.is_saved()

    def finish_checkpoint(self) -> dict[str, WrittenFile]:
        """Waits until the folder is complete; returns this rank's files, hashed."""
        return in_checkpoint(self._trainer_state.finish_saving())

    def load_checkpoint(self, path: Path) -> None:
        """Restores a checkpoint of any of the above, bit-identically."""
        self._memory.restore("weights", "optimizer")
        shards: Mapping[str, torch.Tensor] = {}
        if self._adapters is not None:
            if not self._adapters.base_is(base := path / "trainer" / "base"):
                self._adapters.replace_base(base)
        elif (weights := path / "model").is_dir():
            # A checkpoint lacks no weights, not even a head.
            missing = fill_from_folder(self._policy.model, weights)
            refuse_wrong_weights(called(weights), missing=missing)
        else:
            shards = self._model_state()
        self._num_updates = self._trainer_state.load(path / "trainer", model=shards)
        refresh_scales(self._policy.model)
