"""Interface of generation backends, and their registry."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from nemo_rl_core.config.generation import (
    GENERATION_SECTIONS,
    GenerationConfig,
    RegisteredGeneration,
)
from nemo_rl_core.config.isolation import IsolatedPackages
from nemo_rl_core.config.model import DType
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.weight_sync.transport import LinkSpec
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.registry import Registry

B = TypeVar("B", bound=Any)


@dataclass(frozen=True)
class GenerationSetup:
    """Everything a generation worker needs to start.

    Attributes:
        model_folder: A transformers folder with the architecture and the initial weights.
        config: Sampling settings and engine size.
        max_model_len: Longest prompt plus completion, in tokens.
        stop_token_ids: Tokens that end a completion and are included in it.
        dtype: Type of weights and activations.
        seed: Seed of the engine; each request has a separate one.
        pad_token_id: Padding after a completion in the output.
        isolation: Packages of the workers that are not the project's.
    """

    model_folder: Path
    config: GenerationConfig
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    dtype: DType = "float32"
    seed: int = 0
    pad_token_id: int = 0
    isolation: IsolatedPackages | None = None


@dataclass(frozen=True)
class WeightsProof:
    """Logprobs and completions of fixed prompts before and after a weight update.

    Attributes:
        first: `[B, T]` logprobs of the prompts, computed right after the previous weights were
            loaded; None if those came from a folder.
        last: `[B, T]` logprobs of the prompts, computed just before the update.
        output: Completions with the new weights, in the format of `generate`.
    """

    first: torch.Tensor | None
    last: torch.Tensor
    output: BatchedDataDict


class GenerationBackend(Protocol):
    """One rank of an engine; all ranks of an engine are called together with the same rows.

    A registered class may have the four methods of `StateDictWorker` instead.
    """

    def setup(self, setup: GenerationSetup) -> None:
        """Starts the engine; several ranks find each other through environment variables."""

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """Completes `input_ids [B, T]`, one request per row, with `seeds [B]`.

        Args:
            batch: Any number of rows, with the columns of `GenerationDatumSpec`.
            greedy: Whether to always take the most likely token.

        Returns:
            `output_ids [B, T']` prompt and completion, padded on the right;
            `generation_lengths [B]`, `unpadded_sequence_lengths [B]`, `logprobs [B, T']` of the
            completion's tokens (0 elsewhere), `truncated [B]`.
        """

    def receive_weights(self, link: LinkSpec, index: int) -> str:
        """Replaces all weights with those of one transfer (implemented by `ReceivesWeights`)."""

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights with those of a transformers folder of the same architecture."""

    def wake(self) -> None:
        """Restores the memory that `sleep` released; no-op if awake."""

    def sleep(self) -> None:
        """Releases the memory that only generation needs; no-op if asleep."""

    def peak_memory_gib(self) -> float:
        """Returns the peak memory of this process."""

    def shutdown(self) -> None:
        """Ends the engine."""


def takes_state_dicts(backend: type) -> bool:
    """Whether a class has `update_weights(state_dict)` instead of `receive_weights`."""
    return callable(getattr(backend, "update_weights", None)) and not _receives_weights(backend)


def _receives_weights(backend: type) -> bool:
    method = getattr(backend, "receive_weights", None)
    return method not in (None, GenerationBackend.receive_weights)


_GENERATION_BACKENDS: Registry[GenerationBackend] = Registry(
    "generation backend",
    {
        "vllm": "nemo_rl_core.backends.generation.vllm:VllmBackend",
        "vllm_streaming": "nemo_rl_core.backends.generation.vllm_streaming:StreamingVllmBackend",
        "hf": "nemo_rl_core.backends.generation.hugging_face:HuggingFaceBackend",
        "megatron": "nemo_rl_core.backends.generation.megatron:MegatronInferenceBackend",
    },
)


def register_generation_backend(
    name: str, *, config: type[RegisteredGeneration] | None = None
) -> Callable[[type[B]], type[B]]:
    """Class decorator that registers a generation backend for recipes and trainers.

    Args:
        name: Value of the key `backend` in the section `generation`.
        config: Class of that section; None for a backend without further settings.

    Raises:
        ConfigError: If `config` does not extend `RegisteredGeneration`, or the backend cannot take
            weights.
    """

    def add(cls: type[B]) -> type[B]:
        if not (takes_state_dicts(cls) or _receives_weights(cls)):
            raise ConfigError(
                f"the generation backend {name!r} cannot take the weights of a policy",
                expected=f"{cls.__name__}.update_weights(state_dict), or the base ReceivesWeights",
                fix="add the method",
            )
        GENERATION_SECTIONS.add(name, config, cls.__module__)
        _GENERATION_BACKENDS[name] = cls
        return cls

    return add


get_generation_backend = _GENERATION_BACKENDS.get
"""Returns a generation backend by name; unknown names raise `ConfigError` with the choices."""
