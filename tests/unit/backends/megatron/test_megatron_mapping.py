"""The mapping tables: fusing and splitting weights, without Megatron and without ranks."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.backends.training.megatron.families import FAMILIES
from nemo_rl_core.backends.training.megatron.mapping import (
    DENSE,
    QKV,
    QKV_BIAS,
    entries,
    fuse,
    unfuse,
)


def test_queries_keys_and_values_interleave_by_group() -> None:
    # Two groups of two query heads; heads of two rows. Rows are numbered q 0-7, k 8-11, v 12-15.
    config = SimpleNamespace(kv_channels=2, num_attention_heads=4, num_query_groups=2)
    parts = [torch.arange(8), torch.arange(8, 12), torch.arange(12, 16)]
    fused = fuse(QKV_BIAS, parts, config)
    assert fused.tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    for part, again in zip(parts, unfuse(QKV_BIAS, fused, config), strict=True):
        assert torch.equal(part, again)


def test_gate_comes_before_up() -> None:
    fused = fuse(DENSE[0], [torch.zeros(2, 3), torch.ones(2, 3)], SimpleNamespace())
    assert fused[:, 0].tolist() == [0, 0, 1, 1]


@settings(deadline=None, max_examples=50)
@given(
    groups=st.integers(1, 4), queries=st.integers(1, 4), head=st.integers(1, 4), ranks=st.just(2)
)
def test_slices_of_ranks_fuse_to_slices_of_the_full_weight(
    groups: int, queries: int, head: int, ranks: int
) -> None:
    """`fuse` of one rank's rows gives that rank's rows of the full fused weight."""
    config = SimpleNamespace(
        kv_channels=head,
        num_attention_heads=ranks * groups * queries,
        num_query_groups=ranks * groups,
    )
    rows = [ranks * groups * heads * head for heads in (queries, 1, 1)]
    parts = list(torch.randn(sum(rows), 3).split(rows))
    fused = fuse(QKV, parts, config)
    for rank, expected in enumerate(fused.chunk(ranks)):
        mine = [part.chunk(ranks)[rank] for part in parts]
        assert torch.equal(fuse(QKV, mine, config), expected)
    for part, again in zip(parts, unfuse(QKV, fused, config), strict=True):
        assert torch.equal(part, again)


def test_layers_are_assigned_to_interleaved_stages_in_turn() -> None:
    hf_config = SimpleNamespace(tie_word_embeddings=True)
    config = SimpleNamespace(
        num_layers=8, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    placed = [
        (entry.stage, entry.chunk, entry.rule.megatron, entry.rule.hf[0])
        for entry in entries(FAMILIES["llama"], hf_config, config, fused=False)
        if entry.rule.megatron.endswith("linear_proj.weight")
    ]
    name = "self_attention.linear_proj.weight"
    assert placed == [
        (
            stage,
            chunk,
            f"decoder.layers.{local}.{name}",
            f"model.layers.{layer}.self_attn.o_proj.weight",
        )
        for layer, (stage, chunk, local) in enumerate(
            [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)]
        )
    ]


def test_tied_head_on_another_stage_is_loaded_but_not_exported() -> None:
    hf_config = SimpleNamespace(tie_word_embeddings=True)
    config = SimpleNamespace(
        num_layers=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=None
    )
    heads = [
        entry
        for entry in entries(FAMILIES["llama"], hf_config, config, fused=False)
        if entry.rule.hf == ("model.embed_tokens.weight",)
    ]
    assert [(entry.stage, entry.exported) for entry in heads] == [(0, True), (1, False)]


def test_transformer_engine_stores_norms_in_the_following_layers() -> None:
    hf_config = SimpleNamespace(tie_word_embeddings=False, mlp_only_layers=[0])
    config = SimpleNamespace(
        num_layers=2,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        num_moe_experts=2,
        expert_model_parallel_size=1,
    )
    names = {
        entry.rule.hf[0]: entry.rule.megatron
        for entry in entries(FAMILIES["qwen3_moe"], hf_config, config, fused=True)
    }
    layer = "decoder.layers"
    assert names["model.layers.0.input_layernorm.weight"] == (
        f"{layer}.0.self_attention.linear_qkv.layer_norm_weight"
    )
    assert names["model.layers.0.post_attention_layernorm.weight"] == (
        f"{layer}.0.mlp.linear_fc1.layer_norm_weight"
    )
    assert names["model.layers.1.post_attention_layernorm.weight"] == (
        f"{layer}.1.pre_mlp_layernorm.weight"
    )
    assert names["model.layers.1.mlp.experts.1.down_proj.weight"] == (
        f"{layer}.1.mlp.experts.linear_fc2.weight1"
    )
