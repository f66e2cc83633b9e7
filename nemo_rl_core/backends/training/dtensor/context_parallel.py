"""Context parallelism: each rank computes a part of every row's tokens.

Queries stay on their rank; attention gathers the keys and values of the full row, as for Llama 3
(Dubey et al. 2024, arXiv:2407.21783, section 3.3.2). With an explicit mask every rank does the same
amount of work, so the row is split into consecutive parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nemo_rl_core.backends.training.context_parallel import full_rows, rank_part
from nemo_rl_core.checkpoints.weights import caps_scores
from nemo_rl_core.data.pretrained import shares_rows
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.model_files.loading import SCALAR_HEAD
from nemo_rl_core.planning.model_parts import decoder_of, layers_of, rotary_length, takes

_ATTENTION = "context_parallel_sdpa"
_FULL_ROW_ATTENTION = "full_row_attention"


def apply_context_parallel(model: Any, group: dist.ProcessGroup) -> None:
    """Restricts the decoder's layers to this rank's part of each row, in place.

    The decoder then needs the mask from `packed_causal_mask` and returns hidden states
    `[R, L / ranks, D]`.
    """
    from transformers import AttentionInterface

    decoder: Any = decoder_of(model)
    layers: list[Any] = layers_of(model)
    if hasattr(model, SCALAR_HEAD) or not shares_rows(model.config.to_dict()):
        kind = "a scalar head" if hasattr(model, SCALAR_HEAD) else "a model that reads images"
        raise _cannot_split(model, "a causal text model", kind)
    if caps_scores(decoder.config):
        cap = f"attn_logit_softcapping: {decoder.config.attn_logit_softcapping}"
        raise _cannot_split(model, "attention without a cap on its scores", cap)
    if rotary_length(decoder.config) is not None:
        expected = "rotary embeddings that do not change with the length"
        raise _cannot_split(model, expected, "rope_type dynamic or longrope")
    # Without `layer_types`, as in Mistral's config, a window applies to all layers.
    window = getattr(decoder.config, "sliding_window", None)
    default_type = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(decoder.config, "layer_types", None) or [default_type])
    if kinds != {"full_attention"}:
        raise _cannot_split(
            model, "full attention in every layer", f"layers of {', '.join(sorted(kinds))}"
        )
    if not model._supports_attention_backend:
        raise _cannot_split(model, "a model that calls AttentionInterface", "custom attention")
    if not all(takes(layer, "position_embeddings") for layer in layers):
        raise _cannot_split(model, "layers that take position_embeddings", "layers that do not")
    setattr(model, _FULL_ROW_ATTENTION, decoder.config._attn_implementation)
    AttentionInterface.register(_ATTENTION, _attend_to_full_rows)
    decoder.config._attn_implementation = _ATTENTION
    for number, layer in enumerate(layers):
        for module in layer.modules():
            module.context_group = group
        cut = _token_split(decoder.config, group, first=number == 0)
        layer.register_forward_pre_hook(cut, with_kwargs=True)


@contextmanager
def full_rows_on_each_rank(model: Any) -> Iterator[None]:
    """Context in which each rank computes full rows with the attention that was chosen at load."""
    attention = getattr(model, _FULL_ROW_ATTENTION, None)
    if attention is None:  # not split
        yield
        return
    config = decoder_of(model).config
    config._attn_implementation = attention
    try:
        yield
    finally:
        config._attn_implementation = _ATTENTION


def _cannot_split(model: Any, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"context parallelism cannot split {type(model).__name__}",
        expected=expected,
        got=got,
        fix="set context_parallel_size to 1",
    )


def _token_split(config: Any, group: dist.ProcessGroup, *, first: bool) -> Any:
    """Returns a pre-hook that selects this rank's angles and, in the first layer, tokens."""

    def cut(_: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
        if config._attn_implementation != _ATTENTION:
            return None
        hidden, *others = inputs
        if first:
            hidden = rank_part(hidden, group, dim=1)
        angles = options["position_embeddings"]
        if isinstance(angles, Tensor):
            angles = rank_part(angles, group, dim=1)
        else:
            angles = tuple(rank_part(part, group, dim=1) for part in angles)
        return (hidden, *others), {**options, "position_embeddings": angles}

    return cut


def _attend_to_full_rows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    key, value = (full_rows(part, module.context_group, dim=2) for part in (key, value))
    attended: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, *arguments, **options
    )
    return attended
