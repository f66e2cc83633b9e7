"""Construction of Megatron-core's `GPTModel` from a transformers config, without weights.

Transformer Engine's layers are used if it is installed, else Megatron's local ones without fused
kernels. Dropout is always off, since RL compares logprobs of two passes.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nemo_rl_core.backends.training.megatron.cpu import run_on_cpu_where_cuda_is_absent
from nemo_rl_core.backends.training.megatron.families import (
    Family,
    family_of,
    is_for_bridge,
    is_sparse,
    refuse_indivisible,
)
from nemo_rl_core.backends.training.megatron.layers import layers
from nemo_rl_core.backends.training.megatron.settings import backend_settings, expert_settings
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.training import MegatronTraining


def build_model(folder: Path, training: MegatronTraining, dtype: DType = "float32") -> list[Any]:
    """Builds this rank's chunks of the model, for the layout of `initialize_topology`.

    Parameters are uninitialized until `load_hf_weights` fills them.

    Returns:
        `GPTModel`s, one for each of the `virtual_pipeline_size` stages on this rank. Each has the
        attributes `hf_config` (the transformers config), `hf_family` (None for a model of
        Megatron-Bridge) and `takes_boundaries` (whether attention gets boundaries of packed rows;
        False until the function of that name decides).
    """
    run_on_cpu_where_cuda_is_absent()
    if is_for_bridge(folder):
        from nemo_rl_core.backends.experimental.megatron_bridge import build_with_bridge

        return build_with_bridge(folder, training, dtype)
    family, hf_config = family_of(folder)
    refuse_indivisible(family, hf_config, training)
    config = transformer_config(family, hf_config, training, dtype)
    return [
        _chunk(family, hf_config, config, training, stage)
        for stage in range(training.virtual_pipeline_size)
    ]


def padded_vocabulary_size(vocabulary: int, tensor_parallel_size: int) -> int:
    """Returns the vocabulary size, padded to a multiple of the tensor-parallel ranks."""
    return -(-vocabulary // tensor_parallel_size) * tensor_parallel_size


def transformer_config(
    family: Family, hf_config: Any, training: MegatronTraining, dtype: DType
) -> Any:
    """Returns Megatron's `TransformerConfig` for the architecture and the layout."""
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=_head_size(hf_config),
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm,
        **backend_settings(training, dtype),
        **_experts(family, hf_config),
    )
    # Softmax over the chosen experts equals renormalized softmax over all. The constructor rejects
    # False with one expert per token, since softmax over one expert is 1.
    config.moe_router_pre_softmax = not getattr(hf_config, "norm_topk_prob", True)
    return config


def _experts(family: Family, hf_config: Any) -> dict[str, Any]:
    if family.experts is None or not getattr(hf_config, family.experts.num_experts):
        return {}
    return {
        "num_moe_experts": getattr(hf_config, family.experts.num_experts),
        "moe_ffn_hidden_size": getattr(hf_config, family.experts.intermediate_size),
        "moe_layer_freq": [
            int(is_sparse(hf_config, layer)) for layer in range(hf_config.num_hidden_layers)
        ],
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_pre_softmax": True,
        **expert_settings(),
    }


def _head_size(hf_config: Any) -> int:
    declared = getattr(hf_config, "head_dim", None)
    return int(declared or hf_config.hidden_size // hf_config.num_attention_heads)


def _chunk(
    family: Family, hf_config: Any, config: Any, training: MegatronTraining, stage: int
) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    virtual_stage = stage if training.virtual_pipeline_size > 1 else None
    chunk = GPTModel(
        config,
        layers(config, vp_stage=virtual_stage),
        vocab_size=padded_vocabulary_size(hf_config.vocab_size, training.tensor_parallel_size),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=virtual_stage
        ),
        post_process=parallel_state.is_pipeline_last_stage(
            ignore_virtual=False, vp_stage=virtual_stage
        ),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=hf_config.rope_parameters["rope_theta"],
        vp_stage=virtual_stage,
    )
    # Megatron's options for scaling have different constants, so transformers' frequencies, which
    # the model was trained with, are used.
    chunk.rotary_pos_emb.inv_freq = _rotary_frequencies(hf_config)
    chunk.hf_family, chunk.hf_config = family, hf_config
    chunk.takes_boundaries = False
    return chunk.cuda()


def _rotary_frequencies(hf_config: Any) -> torch.Tensor:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = hf_config.rope_parameters["rope_type"]
    if kind == "default":
        size = _head_size(hf_config)
        powers = torch.arange(0, size, 2, dtype=torch.float32) / size
        return torch.Tensor(1.0 / (hf_config.rope_parameters["rope_theta"] ** powers))
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    assert isinstance(frequencies, torch.Tensor)
    return frequencies
