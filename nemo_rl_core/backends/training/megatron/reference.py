"""The reference policy as a second set of weights for the trained model."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from nemo_rl_core.backends.training.dtensor.loading import shared_vocabulary_size
from nemo_rl_core.backends.training.megatron.families import family_of, is_for_bridge
from nemo_rl_core.backends.training.megatron.weights import load_hf_weights
from nemo_rl_core.errors import ConfigError

# Config fields for names, dropout and generation may differ; shapes and computation may not.
_SAME = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)

# Of models of Megatron-Bridge, whose fields no table has: all but these must be equal.
_FREE = {
    *("architectures", "_name_or_path", "dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("attention_dropout", "hidden_dropout", "initializer_range"),
}


class ReferenceWeights:
    """Weights of the reference, kept on the CPU and swapped into the model for its logprobs.

    Args:
        models: This rank's chunks, whose weights are restored.
        trained: The folder of the trained model.
        folder: The reference's, of the same architecture.

    Attributes:
        vocabulary_size: Number of token ids of both tokenizers.

    Raises:
        ConfigError: If the architectures differ.
        ModelError: If the vocabularies differ.
    """

    def __init__(self, models: list[Any], trained: Path, folder: Path) -> None:
        _refuse_other_architecture(trained, folder)
        self.vocabulary_size = shared_vocabulary_size(trained, folder)
        self._parameters = [p for model in models for p in model.parameters()]
        own = _copies(self._parameters)
        try:
            load_hf_weights(models, folder)
            self._tensors = _copies(self._parameters)
        finally:  # also if a folder lacks a weight and only some are loaded
            _write(own, self._parameters)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the model has the reference's weights; then restores its own."""
        own = _copies(self._parameters)
        _write(self._tensors, self._parameters)
        try:
            yield
        finally:
            _write(own, self._parameters)


def _copies(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in parameters]


@torch.no_grad()
def _write(tensors: list[torch.Tensor], parameters: list[torch.nn.Parameter]) -> None:
    # In place: the optimizer's buffers are views of the same memory.
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.copy_(tensor)


def _refuse_other_architecture(trained: Path, folder: Path) -> None:
    names: Iterable[str] = _SAME
    if is_for_bridge(trained):
        ours, theirs = (AutoConfig.from_pretrained(path) for path in (trained, folder))
        names = sorted((ours.to_dict().keys() | theirs.to_dict().keys()) - _FREE)
    else:
        ours, theirs = (family_of(path)[1] for path in (trained, folder))
    differing = [name for name in names if getattr(ours, name, None) != getattr(theirs, name, None)]
    if differing:
        raise ConfigError(
            f"the reference {folder.name!r} has another architecture than the trained model",
            expected=f"the same {', '.join(differing)}",
            got=", ".join(f"{name}={getattr(theirs, name, None)}" for name in differing),
            fix="the megatron backend swaps the reference's weights into the model it trains; "
            "use the dtensor backend for a teacher of another size",
        )
