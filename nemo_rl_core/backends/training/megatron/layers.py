"""Megatron-core's layers for packed rows, from Transformer Engine or with a local RMSNorm."""

from typing import Any

import torch

from nemo_rl_core.backends.training.megatron.attention import (
    AttentionByBoundaries,
    AttentionToFullRows,
)
from nemo_rl_core.backends.training.megatron.settings import has_transformer_engine


def layers(config: Any, *, vp_stage: int | None = None) -> Any:
    """Returns Megatron's specification of a chunk's layers, for packed rows."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    fused = has_transformer_engine()
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=fused, normalization="RMSNorm", vp_stage=vp_stage
    )
    if not fused:
        _use_local_norm(spec)
        splits_rows = config.context_parallel_size > 1
        attention = AttentionToFullRows if splits_rows else AttentionByBoundaries
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = attention
    return spec


class LocalRMSNorm(torch.nn.RMSNorm):
    """RMSNorm with sequence parallelism for Megatron's local layers, which have none.

    The attribute of its weight makes Megatron sum the gradient over tensor ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _use_local_norm(block_spec: Any) -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    block_spec.layer_norm = LocalRMSNorm
    for layer in block_spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        for owner, name in (
            (layer.submodules, "input_layernorm"),
            (layer.submodules, "pre_mlp_layernorm"),
            (attention, "q_layernorm"),
            (attention, "k_layernorm"),
        ):
            if getattr(owner, name) is not IdentityOp:
                setattr(owner, name, LocalRMSNorm)
