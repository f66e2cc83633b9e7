"""The reference policy as a second set of weights for the trained model."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from nemo_rl_core.backends.training.megatron.families import family_of, is_for_bridge
from nemo_rl_core.backends.training.megatron.weights import load_hf_weights
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.model_files.loading import shared_vocabulary_size

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

# For models of Megatron-Bridge, whose fields are in no table: all others must be equal.
_FREE = {
    *("architectures", "_name_or_path", "dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("attention_dropout", "hidden_dropout", "initializer_range"),
}


class ReferenceWeights:
    """Weights of the reference, kept on the CPU and swapped into the model for its logprobs."""

    def __init__(self, models: list[Any], trained: Path, folder: Path) -> None:
        _refuse_other_architecture(trained, folder)
        self.vocabulary_size = shared_vocabulary_size(trained, folder)
        self._parameters = [p for model in models for p in model.parameters()]
        trained_weights = _copies(self._parameters)
        try:
            load_hf_weights(models, folder)
            self._tensors = _copies(self._parameters)
        finally:  # also if loading fails halfway
            _write(trained_weights, self._parameters)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the model has the reference's weights."""
        trained_weights = _copies(self._parameters)
        _write(self._tensors, self._parameters)
        try:
            yield
        finally:
            _write(trained_weights, self._parameters)


def _copies(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in parameters]


@torch.no_grad()
def _write(tensors: list[torch.Tensor], parameters: list[torch.nn.Parameter]) -> None:
    # Copied in place, since the optimizer's buffers are views of the same memory.
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.copy_(tensor)


def _refuse_other_architecture(trained: Path, folder: Path) -> None:
    names: Iterable[str] = _SAME
    if is_for_bridge(trained):
        ours, theirs = (
            AutoConfig.from_pretrained(path, trust_remote_code=False) for path in (trained, folder)
        )
        names = sorted((ours.to_dict().keys() | theirs.to_dict().keys()) - _FREE)
    else:
        ours, theirs = (family_of(path)[1] for path in (trained, folder))
    differing = [name for name in names if getattr(ours, name, None) != getattr(theirs, name, None)]
    if differing:
        raise ConfigError(
            f"the reference {folder.name!r} has a different architecture than the trained model",
            expected=f"the same {', '.join(differing)}",
            got=", ".join(f"{name}={getattr(theirs, name, None)}" for name in differing),
            fix="use the dtensor backend for a teacher of a different size; the megatron backend "
            "swaps the reference's weights into the trained model",
        )
