"""Interface of training backends, and their registry."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import (
    TRAINING_SECTIONS,
    DTensorTraining,
    RegisteredTraining,
    TrainingConfig,
)
from nemo_rl_core.data.pretrained import described, shares_rows
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.planning.load import StageLoad
from nemo_rl_core.registry import Registry
from nemo_rl_core.telemetry.model_flops import model_shape
from nemo_rl_core.telemetry.timer import peak_memory_gib

_LOG = logging.getLogger(__name__)
B = TypeVar("B", bound=Any)

_LAYERS_WITH_ATTENTION = {"full_attention", "sliding_attention"}
_COST_OF_MASKED_PAIRS = 2.0
"""Time for a pair in attention with a mask, over that of as many FLOPs in a linear layer (CPUs)."""


def warn_of_balancing_loss(hf_config: Any) -> None:
    """Logs that the load-balancing loss of experts is not trained, if the config asks for it."""
    if getattr(hf_config.get_text_config(), "output_router_logits", False):
        _LOG.warning(
            "the load-balancing loss of experts, which output_router_logits asks for in "
            "config.json, is not trained: the loss of a step is the algorithm's, unless "
            "training.router_aux_loss_coef is set (dtensor)"
        )


@dataclass(frozen=True)
class TrainingSetup:
    """Everything a training worker needs to start.

    Attributes:
        model_folder: A transformers folder: config, safetensors, tokenizer.
        optimizer: Settings of AdamW.
        training: The backend's settings, such as the sizes of parallel axes.
        max_tokens_per_microbatch: The token budget of one forward and backward pass.
        temperature: Divisor of logits before every log-softmax; the rollouts' temperature.
        dtype: Type of the matrix products; parameters and optimizer state are float32 always.
        reference_folder: Weights of the reference policy, or None for losses without one.
        seed: For random numbers of the backend.
        head: `lm` for a policy, whose losses read logprobs; `scalar` for a reward model or critic,
            whose losses read values.
        load: What the stage asks of its GPUs, for settings of `training` that are `auto`; a policy
            reads it, and no worker.
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
    load: StageLoad | None = None


def allowed_sharing(model_folder: Path) -> PrefixSharing | None:
    """How a model's sequences may share prefixes, by its config; None if they may not.

    Masks of trees take the place of a model's own, so that layers that attend within a window
    allow sequences up to its length alone. Layers other than attention carry a state from token to
    token along a row.
    """
    config, shape = described(model_folder), model_shape(model_folder)
    text = config.get("text_config", config)
    kinds = set(text.get("layer_types") or ())
    if (
        not shares_rows(config)
        or not shape.attention_width * shape.num_layers
        or kinds - _LAYERS_WITH_ATTENTION
        or not text.get("is_causal", True)
    ):
        return None
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    is_limited = window is not None and (not kinds or "sliding_attention" in kinds)
    longest = float(window or 0) if is_limited else float("inf")
    pairs = shape.pairs_per_token / _COST_OF_MASKED_PAIRS
    return PrefixSharing(pairs_per_token=pairs, longest=longest)


class TrainingBackend(Protocol):
    """One rank of training; batches are padded views, independent of the internal layout.

    With several ranks, all of them call each method together, each with the rows of its
    data-parallel shard (possibly none); ranks of one replica pass the same rows. A shard may have a
    plan in its attribute `microbatches`, of the same length on every rank.
    """

    def setup(self, setup: TrainingSetup) -> None:
        """Loads the model and creates the optimizer; may be called again to start over."""
        ...

    def train_step(self, batch: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        """Runs one optimizer step over the whole batch of all shards.

        Every rank returns the metrics of the whole step.

        With a scalar head the loss's first argument is `[B, T]` values in place of logprobs. If the
        batch has `topk_ids [B, T-1, K]`, the loss also gets `current_topk_logprobs [B, T-1, K]`,
        with gradients. Rows of equal `pair_ids [B]` stay together.
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
        """Ids and logprobs `[B, T-1, k]` of the reference's k most likely next tokens, masked."""
        ...

    def get_values(self, batch: BatchedDataDict) -> torch.Tensor:
        """`[B, T]` values of the prefixes that end with each token, 0 past a sequence's end."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole weights, one at a time, under the names of the transformers checkpoint."""
        ...

    def save_checkpoint(self, path: Path) -> None:
        """Writes weights, optimizer and random state into an existing empty folder."""
        ...

    def start_checkpoint(self, path: Path) -> None:
        """As `save_checkpoint`, of a copy of the state; some of it may be written later."""
        ...

    def checkpoint_is_written(self) -> bool:
        """Returns True if `finish_checkpoint` would not wait."""
        ...

    def finish_checkpoint(self) -> Mapping[str, WrittenFile] | None:
        """Waits until the folder is complete; raises errors of the writing thread.

        Returns:
            Files that this rank has written and hashed, by their paths in the folder; others need
            not be named.
        """
        ...

    def load_checkpoint(self, path: Path) -> None:
        """Restores a checkpoint of `save_checkpoint`, bit-identically."""
        ...

    def peak_memory_gib(self) -> float:
        """Returns the peak memory of this process; a backend need not override it."""
        return peak_memory_gib()

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


def register_training_backend(
    name: str, *, config: type[RegisteredTraining] | None = None
) -> Callable[[type[B]], type[B]]:
    """A class decorator that registers a training backend, which a recipe or trainer then names.

    Args:
        name: For the key `backend` of the section `training`.
        config: The class of that section; None for a backend without settings of its own.

    Raises:
        ConfigError: If `config` does not extend `RegisteredTraining`.
    """

    def add(cls: type[B]) -> type[B]:
        TRAINING_SECTIONS.add(name, config, cls.__module__)
        _TRAINING_BACKENDS[name] = cls
        return cls

    return add


get_training_backend = _TRAINING_BACKENDS.get
"""Returns the training backend of a name; unknown names raise `ConfigError` with the choices."""
