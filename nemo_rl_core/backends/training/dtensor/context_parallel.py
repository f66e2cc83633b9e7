"""Context parallelism: each rank computes a part of every row's tokens.

Queries stay on their rank; attention gathers the keys and values of the whole row, as for Llama 3
(Dubey et al. 2024, arXiv:2407.21783, section 3.3.2). With an explicit mask every rank does the same
work, so the row is split into consecutive parts. Embeddings are computed for the whole row on each
rank, which is cheap and keeps transformers' positions and masks.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from nemo_rl_core.backends.training.context_parallel import own_part, whole_rows
from nemo_rl_core.backends.training.dtensor.loading import SCALAR_HEAD
from nemo_rl_core.checkpoints.weights import caps_scores
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.planning.model_parts import rotary_length

_ATTENTION = "context_parallel_sdpa"


def apply_context_parallel(model: Any, group: dist.ProcessGroup) -> None:
    """Restricts the decoder's layers to this rank's part of each row, in place.

    The decoder then needs the mask of `packed_causal_mask`, and returns hidden states `[R, L /
    ranks, D]`.

    Args:
        model: A transformers model with full attention in every layer.
        group: The ranks of the context axis.

    Raises:
        ConfigError: If some layers use windowed attention, which the explicit mask lacks; if scores
            are capped; or if the model has a scalar head, reads images or changes its rotary
            embeddings with the length, which needs whole rows.
    """
    from transformers import AttentionInterface

    decoder = model.get_decoder()
    config = decoder.config
    # Without `layer_types`, as in Mistral's config, a window is one of all layers.
    window = getattr(config, "sliding_window", None)
    every = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [every])
    cap = f"attn_logit_softcapping: {getattr(config, 'attn_logit_softcapping', None)}"
    checks = [
        (not hasattr(model, SCALAR_HEAD), "a causal model of text", "a scalar head"),
        (decoder is model.base_model, "a causal model of text", "a model that reads images"),
        (not caps_scores(config), "attention without a cap on its scores", cap),
        (
            rotary_length(config) is None,
            "rotary embeddings that do not change with the length",
            "rope_type dynamic or longrope",
        ),
        (
            kinds == {"full_attention"},
            "full attention in every layer",
            f"layers of {', '.join(sorted(kinds))}",
        ),
    ]
    for passes, expected, got in checks:
        if not passes:
            raise ConfigError(
                f"context parallelism cannot split {type(model).__name__}",
                expected=expected,
                got=got,
                fix="set context_parallel_size to 1",
            )
    AttentionInterface.register(_ATTENTION, _attend_to_whole_rows)
    decoder.config._attn_implementation = _ATTENTION
    for number, layer in enumerate(decoder.layers):
        layer.self_attn.context_group = group
        layer.register_forward_pre_hook(_own_tokens(group, first=number == 0), with_kwargs=True)


def _own_tokens(group: dist.ProcessGroup, *, first: bool) -> Any:
    """A pre-forward hook that selects this rank's angles and, in the first layer, tokens."""

    def cut(_: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
        hidden, *others = inputs
        if first:
            hidden = own_part(hidden, group, dim=1)
        angles = tuple(own_part(part, group, dim=1) for part in options["position_embeddings"])
        return (hidden, *others), {**options, "position_embeddings": angles}

    return cut


def _attend_to_whole_rows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    key, value = (whole_rows(part, module.context_group, dim=2) for part in (key, value))
    attended: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, *arguments, **options
    )
    return attended
