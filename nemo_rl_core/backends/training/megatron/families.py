"""Model families of transformers that Megatron-core supports, and their settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nemo_rl_core.backends.training.megatron.settings import Division, refuse_remainders
from nemo_rl_core.checkpoints.model_code import code_files, code_options, is_trusted
from nemo_rl_core.config.megatron_types import (
    BRIDGE,
    BRIDGE_VERSION,
    MEGATRON_TYPES,
    bridge_version,
)
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.data.pretrained import read_model_json
from nemo_rl_core.errors import ModelError
from nemo_rl_core.model_files.loading import name_in_errors
from nemo_rl_core.planning.model_parts import refuse_untrainable

STATIC_ROPE_TYPES = ("default", "linear", "llama3")
"""Kinds of rotary frequencies that do not depend on the row's length and do not scale attention."""


@dataclass(frozen=True)
class Experts:
    """Config fields and weight names of a family's mixture of experts.

    Attributes:
        num_experts: Config field for the number of experts.
        intermediate_size: Config field for the width of an expert.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    num_experts: str = "num_experts"
    intermediate_size: str = "moe_intermediate_size"


@dataclass(frozen=True)
class Family:
    """A decoder type, described by its differences from Llama.

    Attributes:
        qkv_bias: Whether queries, keys and values have biases.
        qk_norm: Whether queries and keys are normalized, head by head.
        unset: Config fields that must be false or None, since Megatron-core does not support them.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    unset: tuple[str, ...] = ()


_MIXTRAL_EXPERTS = Experts(
    block="block_sparse_moe",
    gate="w1",
    up="w3",
    down="w2",
    num_experts="num_local_experts",
    intermediate_size="intermediate_size",
)
_QWEN3_UNSET = ("attention_bias", "use_sliding_window")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(unset=("attention_bias", "mlp_bias")),
        "mixtral": Family(experts=_MIXTRAL_EXPERTS, unset=("sliding_window",)),
        "qwen2": Family(qkv_bias=True, unset=("use_sliding_window",)),
        "qwen3": Family(qk_norm=True, unset=_QWEN3_UNSET),
        "qwen3_moe": Family(qk_norm=True, experts=Experts(), unset=_QWEN3_UNSET),
    }
)


def refuse_model_code(folder: Path) -> None:
    """Refuses a model whose Python code would be replaced by Megatron's layers."""
    if files := code_files(folder):
        raise ModelError(
            f"the megatron backend does not run the Python code of {folder.name!r}",
            expected="the dtensor backend for a model with trust_remote_code",
            got=", ".join(files),
            fix="set training.backend to dtensor, or leave trust_remote_code out",
        )


def _hf_config(folder: Path) -> Any:
    from transformers import AutoConfig

    if is_trusted(folder):
        refuse_model_code(folder)
    return AutoConfig.from_pretrained(folder, **code_options(folder))


def is_for_bridge(folder: Path) -> bool:
    """Returns whether Megatron-Bridge builds a model: if installed, for types not in `FAMILIES`."""
    is_built_in = _hf_config(folder).model_type in MEGATRON_TYPES
    return not is_built_in and bridge_version() is not None


def family_of(folder: Path) -> tuple[Family, Any]:
    """Returns the family of a model folder and its transformers config."""
    config = _hf_config(folder)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelError(
            f"the megatron backend does not support the architecture of {folder.name!r}",
            expected=f"one of the types {', '.join(sorted(FAMILIES))}",
            got=str(config.model_type),
            fix="use the dtensor backend, which trains any causal model of transformers, or "
            f"install {BRIDGE}=={BRIDGE_VERSION}, which builds other types (docs/models.md)",
        )
    refuse_untrainable(read_model_json(folder), called=name_in_errors(folder))
    rope, kinds = config.rope_parameters["rope_type"], getattr(config, "layer_types", None) or ()
    settings: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("hidden_act", config.hidden_act, ("silu",)),
        ("rope_type", rope, STATIC_ROPE_TYPES),
        *((name, getattr(config, name, None), (False, None)) for name in family.unset),
        *(("layer_types", kind, ("full_attention",)) for kind in kinds),
    ]
    for name, value, supported in settings:
        if value not in supported:
            raise ModelError(
                f"the megatron backend does not support the config of {folder.name!r}",
                expected=f"{name} of {' or '.join(map(str, supported))}",
                got=f"{name}={value}",
                fix="use the dtensor backend",
            )
    return family, config


def is_sparse(hf_config: Any, layer: int) -> bool:
    """Returns whether a layer of a mixture of experts has experts instead of a dense block."""
    return layer not in (getattr(hf_config, "mlp_only_layers", None) or []) and (
        (layer + 1) % getattr(hf_config, "decoder_sparse_step", 1) == 0
        and getattr(hf_config, "num_experts", None) != 0
    )


def refuse_indivisible(family: Family, hf_config: Any, training: MegatronTraining) -> None:
    """Raises `ConfigError` if the layout does not divide the architecture."""
    tensor = training.tensor_parallel_size
    divisions: list[Division] = [
        ("attention heads", hf_config.num_attention_heads, "tensor_parallel_size", tensor),
        ("key/value heads", hf_config.num_key_value_heads, "tensor_parallel_size", tensor),
        ("intermediate size", hf_config.intermediate_size, "tensor_parallel_size", tensor),
    ]
    num_experts = None
    if family.experts is not None:
        num_experts = getattr(hf_config, family.experts.num_experts) or None
        width = getattr(hf_config, family.experts.intermediate_size)
        divisions.append(("intermediate size of an expert", width, "tensor_parallel_size", tensor))
    refuse_remainders(divisions, hf_config.num_hidden_layers, num_experts, training)
