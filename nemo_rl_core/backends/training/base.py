"""What a training worker can do, and where one is found by name."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch

from nemo_rl_core.config.model import DType
from nemo_rl_core.config.training import DTensorTraining, OptimizerConfig, TrainingConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.registry import Registry


@dataclass(frozen=True)
class TrainingSetup:
    """All a training worker needs to begin.

    Attributes:
        model_folder: A transformers folder: config, safetensors, tokenizer.
        optimizer: Settings of AdamW.
        training: The backend's own settings: over which axes of ranks, and how.
        max_tokens_per_microbatch: The token budget of one forward and backward pass.
        temperature: What logits are divided by before every log-softmax: that of the rollouts.
        dtype: Type of the matrix products; parameters and optimizer state are float32 always.
        reference_folder: Weights of the reference policy, or None where the loss has none.
        seed: For what the backend draws itself.
        head: `lm` for a policy, whose losses read logprobs; `scalar` for a reward model or critic,
            whose losses read values.
    """

    model_folder: Path
    optimizer: OptimizerConfig
    max_tokens_per_microbatch: int
    training: TrainingConfig = field(default_factory=DTensorTraining)
    temperature: float = 1.0
    dtype: DType = "float32"
    reference_folder: Path | None = None
    seed: int = 0
    head: Literal["lm", "scalar"] = "lm"


class TrainingBackend(Protocol):
    """One rank of training; batches are padded views, whatever the layout inside.

    Where there are several ranks, all of them call each method together, each with the rows of its
    data-parallel shard (maybe none); ranks that share a replica give the same rows. A shard may
    carry its plan as an attribute `microbatches`, as long on every rank.
    """

    def setup(self, setup: TrainingSetup) -> None:
        """Loads the model and makes an optimizer; may be called again to start over."""
        ...

    def train_step(self, batch: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        """One optimizer step over the whole batch, that of all shards.

        The metrics are those of the whole step on every rank.

        With a scalar head the loss's first argument is `[B, T]` values in place of logprobs. Where
        the batch has `topk_ids [B, T-1, K]`, the loss also finds `current_topk_logprobs
        [B, T-1, K]` in it, with gradients. Rows of equal `pair_ids [B]`, where the batch has such,
        reach the loss together.
        """
        ...

    def get_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """`[B, T-1]` logprobs of the next tokens where `token_mask` is set, else 0."""
        ...

    def get_reference_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """As `get_logprobs`, under the reference policy."""
        ...

    def get_reference_topk_logprobs(
        self, batch: BatchedDataDict, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and logprobs `[B, T-1, k]` of the reference's likeliest next tokens, masked alike."""
        ...

    def get_values(self, batch: BatchedDataDict) -> torch.Tensor:
        """`[B, T]` values of the prefixes that end with each token, 0 past a sequence's end."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights, one at a time, as the transformers checkpoint names them."""
        ...

    def save_checkpoint(self, path: Path) -> None:
        """Writes weights, optimizer and random state into an existing empty folder."""
        ...

    def start_checkpoint(self, path: Path) -> None:
        """As `save_checkpoint`, of a copy of the state; some of it may be written later."""
        ...

    def checkpoint_is_written(self) -> bool:
        """Whether `finish_checkpoint` would not have to wait."""
        ...

    def finish_checkpoint(self) -> None:
        """Waits until the folder is whole; raises what writing it has raised."""
        ...

    def load_checkpoint(self, path: Path) -> None:
        """Goes on from what `save_checkpoint` wrote, to the bit."""
        ...

    def shutdown(self) -> None:
        """Frees the memory."""
        ...


_TRAINING_BACKENDS: Registry[TrainingBackend] = Registry(
    "training backend",
    {
        "dtensor": "nemo_rl_core.backends.training.dtensor.backend:DTensorBackend",
        "megatron": "nemo_rl_core.backends.training.megatron.backend:MegatronBackend",
    },
)
register_training_backend = _TRAINING_BACKENDS.register
"""Registers a training backend under a name: a class decorator."""
get_training_backend = _TRAINING_BACKENDS.get
"""The training backend of a name; an unknown name raises `ConfigError` with the choices."""
