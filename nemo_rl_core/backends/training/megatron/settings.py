"""Settings of Megatron-core that apply to any model, and checks of the layout's divisions."""

import importlib.util
from typing import Any

import torch

from nemo_rl_core.config.model import DType
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.errors import ConfigError


def has_transformer_engine() -> bool:
    """Returns whether Transformer Engine is installed and there is a GPU.

    If it is installed but cannot be imported, the import of Megatron-core raises its error.
    """
    return torch.cuda.is_available() and bool(importlib.util.find_spec("transformer_engine"))


def parallel_sizes(training: MegatronTraining) -> dict[str, int | None]:
    """Returns the sizes of the axes under Megatron's names."""
    # None is Megatron's value for a non-interleaved pipeline.
    virtual_stages = training.virtual_pipeline_size if training.virtual_pipeline_size > 1 else None
    return {
        "tensor_model_parallel_size": training.tensor_parallel_size,
        "pipeline_model_parallel_size": training.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual_stages,
        "context_parallel_size": training.context_parallel_size,
        "expert_model_parallel_size": training.expert_parallel_size,
    }


def backend_settings(training: MegatronTraining, dtype: DType) -> dict[str, Any]:
    """Returns the fields of a `TransformerConfig` that do not depend on the architecture."""
    params_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
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
        # Otherwise each layer reads the length of every sequence from the GPU.
        "apply_rope_fusion": fused,
        "gradient_accumulation_fusion": False,
        **parallel_sizes(training),
        "sequence_parallel": training.sequence_parallel,
        # Rows of different micro-batches differ in length, so stages exchange shapes.
        "variable_seq_lengths": training.pipeline_parallel_size > 1,
        # A dispatcher that supports rows of any length; Megatron requires one even without experts.
        "moe_token_dispatcher_type": "alltoall",
        "recompute_granularity": "full" if training.recomputes else None,
        "recompute_method": "uniform" if training.recomputes else None,
        "recompute_num_layers": 1 if training.recomputes else None,
    }


def expert_settings() -> dict[str, Any]:
    """Returns additional settings for models with experts."""
    return {
        "moe_router_dtype": "fp32",
        # The load-balancing loss is not trained; see `warn_of_balancing_loss`.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": has_transformer_engine(),
    }


Division = tuple[str, int, str, int]
"""Name of the divided things, their number, the dividing setting, and the number of parts."""


def refuse_remainders(
    divisions: list[Division], num_layers: int, num_experts: int | None, training: MegatronTraining
) -> None:
    """Raises `ConfigError` for a division with a remainder, or experts that the layout excludes."""
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
            "experts over tensor-parallel ranks gather rows of unequal size, which gloo does not "
            "support",
            expected="tensor_parallel_size of 1 on a CPU",
            got=str(tensor),
            fix="distribute experts with expert_parallel_size, or use GPUs",
        )
