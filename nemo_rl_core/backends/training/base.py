"""Interface of training backends, and their registry."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.config.isolation import IsolatedPackages
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import (
    TRAINING_SECTIONS,
    DTensorTraining,
    RegisteredTraining,
    TrainingConfig,
)
from nemo_rl_core.data.pretrained import read_model_json, shares_rows
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.planning.load import StageLoad
from nemo_rl_core.registry import Registry
from nemo_rl_core.telemetry.model_flops import model_shape
from nemo_rl_core.telemetry.usage import peak_memory_gib

_LOG = logging.getLogger(__name__)
B = TypeVar("B", bound=Any)

_LAYERS_WITH_ATTENTION = {"full_attention", "sliding_attention"}
_COST_OF_MASKED_PAIRS = 2.0
"""Time per pair in masked attention, relative to a linear layer with as many FLOPs (on CPUs)."""


def warn_of_balancing_loss(hf_config: Any) -> None:
    """Logs that the load-balancing loss of experts is not trained, if the config enables it."""
    if getattr(hf_config.get_text_config(), "output_router_logits", False):
        _LOG.warning(
            "config.json sets output_router_logits, but the load-balancing loss of experts is not "
            "trained; set training.router_aux_loss_coef (dtensor) to add it to the algorithm's loss"
        )


@dataclass(frozen=True)
class TrainingSetup:
    """Everything a training worker needs to start.

    Attributes:
        model_folder: A transformers folder: config, safetensors, tokenizer.
        optimizer: Settings of AdamW.
        training: Settings of the backend, such as the sizes of parallel axes.
        max_tokens_per_microbatch: Token budget of one forward and backward pass.
        temperature: Divisor of logits before every log-softmax; the rollouts' temperature.
        dtype: Type of the matrix products; parameters and optimizer state are always float32.
        reference_folder: Weights of the reference policy, or None for losses without one.
        seed: Seed of the backend's random numbers.
        head: `lm` for a policy, whose losses read logprobs; `scalar` for a reward model or critic,
            whose losses read values.
        isolation: Packages of the workers that are not the project's.
        load: Memory and compute that the stage needs, used to resolve `auto` settings of
            `training`. Only the policy reads it, not the workers.
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
    isolation: IsolatedPackages | None = None
    load: StageLoad | None = None


def refuse_k(k: int, num_ids: int) -> None:
    """Raises `ConfigError` unless k of `num_ids` tokens can be chosen."""
    if not 1 <= k <= num_ids:
        raise ConfigError(
            f"the {k} most likely tokens cannot be chosen",
            expected=f"k from 1 to the vocabulary's {num_ids} tokens",
            got=str(k),
            fix="change k",
        )


def allowed_sharing(model_folder: Path) -> PrefixSharing | None:
    """Returns how a model's sequences may share prefixes, from its config; None if they may not.

    The mask of a prefix tree replaces the model's mask, so with windowed attention sequences may
    only be as long as the window. Layers other than attention carry state from token to token along
    a row and do not allow sharing.
    """
    config, shape = read_model_json(model_folder), model_shape(model_folder)
    text = config.get("text_config", config)
    kinds = set(text.get("layer_types") or ())
    if (
        not shares_rows(config)
        or not (shape.attention_width and shape.num_layers)
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
    data-parallel shard (possibly none); ranks of one replica pass the same rows. A shard's
    attribute `microbatches` may contain a plan, which has the same length on every rank.
    """

    def setup(self, setup: TrainingSetup) -> None:
        """Loads the model and creates the optimizer; may be called again to start over."""

    def train_step(self, batch: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        """Runs one optimizer step over the full batch of all shards.

        Args:
            batch: `input_ids [B, T]`, `input_lengths [B]`, `token_mask [B, T-1]`,
                `sample_mask [B]`, and the columns that the loss reads. Rows with equal
                `pair_ids [B]` stay in one micro-batch. With `topk_ids [B, T-1, K]` the loss also
                gets `current_topk_logprobs [B, T-1, K]`, with gradients.
            loss_fn: The loss; its sum over micro-batches is the loss of the step. Its first
                argument is `[B, T-1]` logprobs, or `[B, T]` values with a scalar head.

        Returns:
            The loss's metrics, and `grad_norm`, `learning_rate`, `num_valid_tokens`, for the full
            step, on every rank.
        """

    def get_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """Returns `[B, T-1]` logprobs of the next tokens where `token_mask` is set, else 0."""

    def get_reference_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """Returns the logprobs of `get_logprobs` under the reference policy."""

    def get_reference_topk_logprobs(
        self, batch: BatchedDataDict, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids and logprobs `[B, T-1, k]` of the reference's k most likely next tokens.

        Both are 0 where `token_mask` is not set.
        """

    def get_values(self, batch: BatchedDataDict) -> torch.Tensor:
        """Returns `[B, T]` values of the prefixes that end with each token, 0 in the padding."""

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields full weights, one at a time, under the names of the transformers checkpoint."""

    def save_checkpoint(self, path: Path) -> None:
        """Writes weights, optimizer and random state into an existing empty folder."""

    def start_checkpoint(self, path: Path) -> None:
        """Copies the state and starts to save it; may return before all of it is written."""

    def checkpoint_is_written(self) -> bool:
        """Returns True if `finish_checkpoint` would not wait."""

    def finish_checkpoint(self) -> Mapping[str, WrittenFile] | None:
        """Waits until the folder is complete; raises errors of the writing thread.

        Returns:
            Files that this rank has written and hashed, by path in the folder. May be incomplete.
        """

    def load_checkpoint(self, path: Path) -> None:
        """Restores a checkpoint of `save_checkpoint`, bit-identically."""

    def peak_memory_gib(self) -> float:
        """Returns the peak memory of this process."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Frees the memory."""


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
    """Class decorator that registers a training backend for recipes and trainers.

    Args:
        name: Value of the key `backend` in the section `training`.
        config: Class of that section; None for a backend without further settings.

    Raises:
        ConfigError: If `config` does not extend `RegisteredTraining`.
    """

    def add(cls: type[B]) -> type[B]:
        TRAINING_SECTIONS.add(name, config, cls.__module__)
        _TRAINING_BACKENDS[name] = cls
        return cls

    return add


get_training_backend = _TRAINING_BACKENDS.get
"""Returns a training backend by name; unknown names raise `ConfigError` with the choices."""
