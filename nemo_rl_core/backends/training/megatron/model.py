"""Megatron-core's `GPTModel` from a transformers config: this rank's chunks, without weights.

Transformer Engine's layers are used if it is installed, else Megatron's local ones without fused
kernels. Dropout is always off, since RL compares logprobs of two passes.
"""

import importlib.util
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
)
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.errors import ConfigError


def has_transformer_engine() -> bool:
    """Returns whether Transformer Engine is installed and there is a GPU.

    One that cannot be imported ends the import of Megatron-core with its error.
    """
    return torch.cuda.is_available() and bool(importlib.util.find_spec("transformer_engine"))


def build_model(folder: Path, training: MegatronTraining, dtype: DType = "float32") -> list[Any]:
    """Builds this rank's chunks of the model, for the layout of `initialize_topology`.

    Their parameters hold no values yet: `load_hf_weights` fills them.

    Args:
        folder: A transformers folder; only its config is read.
        training: The layout.
        dtype: Dtype of the parameters in matrix products.

    Returns:
        `GPTModel`s, one for each of `virtual_pipeline_size` stages that this rank holds. Each has
        the attributes `hf_config`, the transformers config, `hf_family`, None for a model of
        Megatron-Bridge, and `takes_boundaries`: whether packed rows go to its attention as
        boundaries; not so until `takes_boundaries`.

    Raises:
        ModelError: If Megatron-core cannot hold the architecture.
        ConfigError: If the layout does not divide it.
    """
    run_on_cpu_where_cuda_is_absent()
    if is_for_bridge(folder):
        from nemo_rl_core.backends.training.megatron.bridge import build_with_bridge

        return build_with_bridge(folder, training, dtype)
    family, hf_config = family_of(folder)
    refuse_indivisible(family, hf_config, training)
    config = transformer_config(family, hf_config, training, dtype)
    return [
        _chunk(family, hf_config, config, training, stage)
        for stage in range(training.virtual_pipeline_size)
    ]


def padded_vocabulary_size(vocabulary: int, tensor_parallel_size: int) -> int:
    """The vocabulary size, padded to a multiple of the tensor-parallel ranks.

    Example:
        >>> padded_vocabulary_size(49, 2)
        50
    """
    return -(-vocabulary // tensor_parallel_size) * tensor_parallel_size


def transformer_config(
    family: Family, hf_config: Any, training: MegatronTraining, dtype: DType
) -> Any:
    """Megatron's `TransformerConfig` for the architecture and the layout."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
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


def backend_settings(training: MegatronTraining, dtype: DType) -> dict[str, Any]:
    """Fields of a `TransformerConfig` that do not depend on the architecture.

    They are the layout, the dtype, and how this backend computes any model.
    """
    params_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    # None is Megatron's value for a non-interleaved pipeline.
    virtual_stages = training.virtual_pipeline_size if training.virtual_pipeline_size > 1 else None
    fused = has_transformer_engine()
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "bf16": dtype == "bfloat16",
        # All weights come from a checkpoint.
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "persist_layer_norm": fused,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "masked_softmax_fusion": False,
        # Otherwise each layer asks the GPU how long every sequence is.
        "apply_rope_fusion": fused,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": training.tensor_parallel_size,
        "pipeline_model_parallel_size": training.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual_stages,
        "context_parallel_size": training.context_parallel_size,
        "sequence_parallel": training.sequence_parallel,
        "expert_model_parallel_size": training.expert_parallel_size,
        # Rows of different micro-batches differ in length, so stages exchange shapes.
        "variable_seq_lengths": training.pipeline_parallel_size > 1,
        # The dispatcher for rows of any length, which Megatron requires with or without experts.
        "moe_token_dispatcher_type": "alltoall",
        **_recomputation(training),
    }


def _recomputation(training: MegatronTraining) -> dict[str, Any]:
    if not training.recomputes:
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def _experts(family: Family, hf_config: Any) -> dict[str, Any]:
    if family.experts is None:
        return {}
    return {
        "num_moe_experts": getattr(hf_config, family.experts.num_experts),
        "moe_ffn_hidden_size": getattr(hf_config, family.experts.intermediate_size),
        "moe_layer_freq": [
            int(is_sparse(hf_config, layer)) for layer in range(hf_config.num_hidden_layers)
        ],
        "moe_router_topk": hf_config.num_experts_per_tok,
        # Softmax over the chosen experts equals renormalized softmax over all.
        "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
        **expert_settings(),
    }


def expert_settings() -> dict[str, Any]:
    """As `backend_settings`, for models with experts."""
    return {
        "moe_router_dtype": "fp32",
        # No auxiliary loss: the loss of a step is the algorithm's, on every backend.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": has_transformer_engine(),
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
    # Megatron has options for two kinds of scaling, with other constants; transformers' frequencies
    # are those of the model's training.
    chunk.rotary_pos_emb.inv_freq = _rotary_frequencies(hf_config)
    chunk.hf_family, chunk.hf_config = family, hf_config
    chunk.takes_boundaries = False
    return chunk.cuda()


def layers(config: Any, *, vp_stage: int | None = None) -> Any:
    """Megatron's specification of a chunk's layers, for packed rows.

    Args:
        config: Megatron's `TransformerConfig`.
        vp_stage: Index of the chunk on its rank, where it has several.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    fused = has_transformer_engine()
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=fused, normalization="RMSNorm", vp_stage=vp_stage
    )
    if not fused:
        _use_own_norm(spec)
        if config.context_parallel_size > 1:
            from nemo_rl_core.backends.training.megatron.context import attend_to_whole_rows

            attend_to_whole_rows(spec)
        else:
            from nemo_rl_core.backends.training.megatron.attention import attend_by_boundaries

            attend_by_boundaries(spec)
    return spec


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


class LocalRMSNorm(torch.nn.RMSNorm):
    """RMSNorm with sequence parallelism for Megatron's local layers, which lack one.

    The mark on its weight makes Megatron sum the gradient over tensor ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _use_own_norm(block_spec: Any) -> None:
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


Division = tuple[str, int, str, int]
"""What is divided, its number, the setting that divides it, and into how many parts."""


def refuse_indivisible(family: Family, hf_config: Any, training: MegatronTraining) -> None:
    """Raises before loading if the layout does not divide the architecture.

    Raises:
        ConfigError: Names the first indivisible number, or the missing package.
    """
    tensor = training.tensor_parallel_size
    divisions: list[Division] = [
        ("attention heads", hf_config.num_attention_heads, "tensor_parallel_size", tensor),
        ("key/value heads", hf_config.num_key_value_heads, "tensor_parallel_size", tensor),
        ("intermediate size", hf_config.intermediate_size, "tensor_parallel_size", tensor),
    ]
    num_experts = None
    if family.experts is not None:
        num_experts = getattr(hf_config, family.experts.num_experts)
        width = getattr(hf_config, family.experts.intermediate_size)
        divisions.append(("intermediate size of an expert", width, "tensor_parallel_size", tensor))
    refuse_remainders(divisions, hf_config.num_hidden_layers, num_experts, training)


def refuse_remainders(
    divisions: list[Division], num_layers: int, num_experts: int | None, training: MegatronTraining
) -> None:
    """Raises if a division, or that of layers and experts over the layout, leaves a remainder.

    Raises:
        ConfigError: Names the first of them, or what the layout needs for experts.
    """
    tensor, experts = training.tensor_parallel_size, training.expert_parallel_size
    stages = training.pipeline_parallel_size * training.virtual_pipeline_size
    divisions = [*divisions, ("layers", num_layers, "pipeline and virtual pipeline size", stages)]
    if num_experts is not None:
        divisions.append(("experts", num_experts, "expert_parallel_size", experts))
    elif experts > 1:
        raise ConfigError(
            "expert_parallel_size is set for a model without experts",
            expected="1",
            got=str(experts),
            fix="leave expert_parallel_size out",
        )
    for what, number, name, parts in divisions:
        if number % parts:
            raise ConfigError(
                f"{number} {what} cannot be divided by the {name} of {parts}",
                expected=f"a {name} that divides {number}",
                got=str(parts),
                fix="change the layout in the training config",
            )
    if num_experts is not None and tensor > 1 and not training.sequence_parallel:
        raise ConfigError(
            "experts over tensor-parallel ranks need sequence parallelism in Megatron-core",
            expected="sequence_parallel: true",
            got="sequence_parallel: false",
            fix="set sequence_parallel, or tensor_parallel_size to 1",
        )
    if num_experts is not None and tensor > 1 and not torch.cuda.is_available():
        raise ConfigError(
            "experts over tensor-parallel ranks gather rows of unequal size, which gloo cannot",
            expected="tensor_parallel_size of 1 on a CPU",
            got=str(tensor),
            fix="distribute experts with expert_parallel_size, or use GPUs",
        )
