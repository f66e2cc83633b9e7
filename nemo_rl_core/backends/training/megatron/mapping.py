"""Mapping between weights of a transformers checkpoint and of Megatron-core, as tables.

Fused tensors are built from the parts of one rank, so that neither loading nor export needs a full
fused tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from nemo_rl_core.backends.training.megatron.families import Experts, Family, is_sparse


@dataclass(frozen=True)
class Rule:
    """One weight of Megatron and the transformers tensors that it consists of.

    Attributes:
        megatron: Name of the weight, relative to its layer if it has one.
        hf: Names of its parts in transformers, also relative to the layer.
        split: Dimension that tensor-parallel ranks split; None if replicated.
        fusion: Layout of several parts: concatenated, or interleaved by query group (the group's
            queries, its key, its value).
        padded: Whether rows are padded with zeros to a multiple of the tensor-parallel ranks.
    """

    megatron: str
    hf: tuple[str, ...]
    split: Literal[0, 1] | None = None
    fusion: Literal["stacked", "by_query_group"] = "stacked"
    padded: bool = False


@dataclass(frozen=True)
class Entry:
    """A rule for one weight of the model.

    Attributes:
        stage: Pipeline rank that has the weight.
        expert_rank: Expert-parallel rank that has the weight; None outside of experts.
        exported: False for the copy of the embedding that a tied head has on another stage.
    """

    rule: Rule
    stage: int
    chunk: int
    expert_rank: int | None = None
    exported: bool = True


EMBEDDING = Rule(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), split=0, padded=True
)
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",))
HEAD = Rule("output_layer.weight", ("lm_head.weight",), split=0, padded=True)
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
QKV = Rule(
    "self_attention.linear_qkv.weight",
    tuple(f"{name}.weight" for name in _QKV),
    split=0,
    fusion="by_query_group",
)
QKV_BIAS = Rule(
    "self_attention.linear_qkv.bias",
    tuple(f"{name}.bias" for name in _QKV),
    split=0,
    fusion="by_query_group",
)
ATTENTION_OUTPUT = Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), split=1)
QK_NORM = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
DENSE = (
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), split=0),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), split=1),
)
INPUT_NORM = Rule("input_layernorm.weight", ("input_layernorm.weight",))
MLP_NORM = Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",))
# Transformer Engine's linear layers include the preceding norm, except in experts.
FUSED_INPUT_NORM = replace(INPUT_NORM, megatron="self_attention.linear_qkv.layer_norm_weight")
FUSED_MLP_NORM = replace(MLP_NORM, megatron="mlp.linear_fc1.layer_norm_weight")


def expert_rules(experts: Experts, expert: int, local_expert: int, *, fused: bool) -> list[Rule]:
    """Returns the rules of one expert's weights; `fused` experts are grouped into one module."""
    hf = f"{experts.block}.experts.{expert}"
    names = [
        f"mlp.experts.{layer}.weight{local_expert}"
        if fused
        else f"mlp.experts.local_experts.{local_expert}.{layer}.weight"
        for layer in ("linear_fc1", "linear_fc2")
    ]
    return [
        Rule(names[0], (f"{hf}.{experts.gate}.weight", f"{hf}.{experts.up}.weight"), split=0),
        Rule(names[1], (f"{hf}.{experts.down}.weight",), split=1),
    ]


def entries(family: Family, hf_config: Any, config: Any, *, fused: bool) -> Iterator[Entry]:
    """Yields every weight of the model in the order of transformers' modules, on every rank."""
    num_stages = config.pipeline_model_parallel_size
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    layers_per_chunk = config.num_layers // (num_stages * num_chunks)
    yield Entry(EMBEDDING, stage=0, chunk=0)
    for layer in range(config.num_layers):
        # Interleaving assigns chunks to stages in turn.
        chunk, stage = divmod(layer // layers_per_chunk, num_stages)
        for rule, expert_rank in _layer(family, hf_config, config, layer, fused=fused):
            yield Entry(
                replace(
                    rule,
                    megatron=f"decoder.layers.{layer % layers_per_chunk}.{rule.megatron}",
                    hf=tuple(f"model.layers.{layer}.{name}" for name in rule.hf),
                ),
                stage,
                chunk,
                expert_rank,
            )
    last = {"stage": num_stages - 1, "chunk": num_chunks - 1}
    yield Entry(FINAL_NORM, **last)
    if not hf_config.tie_word_embeddings:
        yield Entry(HEAD, **last)
    elif num_stages > 1:
        yield Entry(replace(HEAD, hf=EMBEDDING.hf), **last, exported=False)


def _layer(
    family: Family, hf_config: Any, config: Any, layer: int, *, fused: bool
) -> Iterator[tuple[Rule, int | None]]:
    yield QKV, None
    if family.qkv_bias:
        yield QKV_BIAS, None
    yield ATTENTION_OUTPUT, None
    if family.qk_norm:
        for rule in QK_NORM:
            yield rule, None
    sparse = family.experts is not None and is_sparse(hf_config, layer)
    if family.experts is not None and sparse:
        yield Rule("mlp.router.weight", (f"{family.experts.block}.gate.weight",)), None
        experts_per_rank = config.num_moe_experts // config.expert_model_parallel_size
        for expert in range(config.num_moe_experts):
            expert_rank, local_expert = divmod(expert, experts_per_rank)
            for rule in expert_rules(family.experts, expert, local_expert, fused=fused):
                yield rule, expert_rank
    else:
        for rule in DENSE:
            yield rule, None
    yield FUSED_INPUT_NORM if fused else INPUT_NORM, None
    yield FUSED_MLP_NORM if fused and not sparse else MLP_NORM, None


def fuse(rule: Rule, parts: list[torch.Tensor], config: Any) -> torch.Tensor:
    """Fuses one rank's slices of the parts into its Megatron weight.

    Example:
        Two query groups of two heads, one row per head: queries 0 to 3, keys 4, 5, values 6, 7.

        >>> from types import SimpleNamespace
        >>> head_of_one_row = SimpleNamespace(kv_channels=1)
        >>> parts = [torch.arange(4), torch.arange(4, 6), torch.arange(6, 8)]
        >>> fuse(QKV, parts, head_of_one_row).tolist()
        [0, 1, 4, 6, 2, 3, 5, 7]
    """
    if rule.fusion == "stacked":
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    groups = parts[1].shape[0] // config.kv_channels
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)  # type: ignore[no-untyped-call]


def unfuse(rule: Rule, weight: torch.Tensor, config: Any) -> list[torch.Tensor]:
    """Splits a fused weight into contiguous parts, the inverse of `fuse`."""
    if rule.fusion == "stacked":
        return [part.contiguous() for part in weight.chunk(len(rule.hf))]
    head = config.kv_channels
    queries = head * config.num_attention_heads // config.num_query_groups
    grouped = weight.unflatten(0, (-1, queries + 2 * head))  # type: ignore[no-untyped-call]
    return [part.flatten(0, 1).contiguous() for part in grouped.split([queries, head, head], dim=1)]
