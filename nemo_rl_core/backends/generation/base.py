"""What a generation worker can do, and where one is found by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from nemo_rl_core.config.generation import GenerationConfig
from nemo_rl_core.config.model import DType
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.weight_sync import LinkSpec
from nemo_rl_core.registry import Registry


@dataclass(frozen=True)
class GenerationSetup:
    """All a generation worker needs to begin.

    Attributes:
        model_folder: A transformers folder; gives the architecture and the first weights.
        config: Sampling settings and engine size.
        max_model_len: Longest prompt plus completion, in tokens.
        stop_token_ids: Tokens that end a completion; they are part of it.
        dtype: Type of weights and activations.
        seed: Of the engine; requests carry their own.
        pad_token_id: What fills the output behind a completion.
    """

    model_folder: Path
    config: GenerationConfig
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    dtype: DType = "float32"
    seed: int = 0
    pad_token_id: int = 0


@dataclass(frozen=True)
class WeightsProof:
    """What an engine computed of fixed prompts when its weights were replaced.

    Attributes:
        first: `[B, T]` the prompts' logprobs when it was given the weights that were replaced; None
            where these came from a folder.
        last: `[B, T]` the same, just before they were replaced.
        output: Completions with the new weights, as `generate` returns them.
    """

    first: torch.Tensor | None
    last: torch.Tensor
    output: BatchedDataDict


class GenerationBackend(Protocol):
    """One rank of an engine; the ranks of an engine are called together, with the same rows."""

    def setup(self, setup: GenerationSetup) -> None:
        """Starts the engine; several ranks find one another by their environment."""
        ...

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """Completes `input_ids [B, T]`, one request a row, each with its own `seeds [B]`.

        Args:
            batch: Perhaps no rows; columns as `GenerationDatumSpec` has them.
            greedy: The likeliest token each time.

        Returns:
            `output_ids [B, T']` prompt and completion, padded on the right;
            `generation_lengths [B]`,
            `unpadded_sequence_lengths [B]`, `logprobs [B, T']` of the completion's tokens (0
            elsewhere), `truncated [B]`.
        """
        ...

    def receive_weights(self, link: LinkSpec, index: int) -> str:
        """Replaces all weights by those of one transfer (`ReceivesWeights` has it)."""
        ...

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights by those of a transformers folder of the same architecture."""
        ...

    def wake(self) -> None:
        """Takes back the memory that `sleep` has given away; awake, does nothing."""
        ...

    def sleep(self) -> None:
        """Gives away the memory that only generation needs; asleep, does nothing."""
        ...

    def peak_memory_gib(self) -> float:
        """The most memory this process has held."""
        ...

    def shutdown(self) -> None:
        """Ends the engine."""
        ...


_GENERATION_BACKENDS: Registry[GenerationBackend] = Registry(
    "generation backend",
    {
        "vllm": "nemo_rl_core.backends.generation.vllm:VllmBackend",
        "vllm_streaming": "nemo_rl_core.backends.generation.vllm_streaming:StreamingVllmBackend",
        "hf": "nemo_rl_core.backends.generation.hugging_face:HuggingFaceBackend",
        "megatron": "nemo_rl_core.backends.generation.megatron:MegatronInferenceBackend",
    },
)
register_generation_backend = _GENERATION_BACKENDS.register
"""Registers a generation backend under a name: a class decorator."""
get_generation_backend = _GENERATION_BACKENDS.get
"""The generation backend of a name; an unknown name raises `ConfigError` with the choices."""
