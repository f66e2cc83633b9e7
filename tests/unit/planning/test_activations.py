"""Activations that layers keep for the backward pass, counted by saved-tensor hooks."""

from typing import Any

import pytest
import torch

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.planning.load import StageLoad, TrainingLoad, layout_of
from nemo_rl_core.planning.memory import layer_bytes
from nemo_rl_core.planning.sizes import sizes_of

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
FEW, MANY = 64, 192


class Fused(torch.autograd.Function):
    """Keeps what a fused kernel keeps; its values do not matter."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None, None


def repeated(part: torch.Tensor, heads: int) -> torch.Tensor:
    return part.repeat_interleave(heads // part.shape[1], dim=1)


def kept_bytes(config: dict[str, Any], tokens: int, *, dtype: str, ranks: int, repeat: bool) -> int:
    """Bytes that one layer keeps of a row, weights and rotary frequencies left out."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    def attend(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        if repeat:
            key, value = (repeated(part, query.shape[1]) for part in (key, value))
        parts = [part.to(getattr(torch, dtype)) for part in (query, key, value)]
        return Fused.apply(*(part.transpose(1, 2).contiguous() for part in parts)), None

    AttentionInterface.register("counted", attend)
    described = AutoConfig.for_model(**config)
    described._attn_implementation = "counted"
    # FSDP2 gathers in 16 bits; a single rank has float32 weights, which autocast casts.
    residual = getattr(torch, dtype) if ranks > 1 else torch.float32
    model = AutoModelForCausalLM.from_config(described, dtype=residual).eval()
    row = torch.randn(1, tokens, config["hidden_size"], dtype=residual, requires_grad=True)
    positions = torch.arange(tokens)[None]
    rotary = model.model.rotary_emb(row, positions)
    others = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *rotary)}
    results: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in others:
            results[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        model.model.layers[0](
            row, position_ids=positions, position_embeddings=rotary, use_cache=False
        )
    return sum(size for size, _ in results.values())


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
@pytest.mark.parametrize(("dtype", "ranks"), [("bfloat16", 2), ("bfloat16", 1), ("float32", 1)])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3", "mistral", "qwen3_moe"])
def test_bytes_a_token_are_those_that_torch_keeps(
    kind: str, dtype: str, ranks: int, attention: Any
) -> None:
    torch.manual_seed(0)
    config = {**CONFIG, "model_type": kind, **(EXPERTS if kind == "qwen3_moe" else {})}
    options: Any = {"dtype": dtype, "ranks": ranks, "repeat": attention == "sdpa"}
    few, many = (kept_bytes(config, tokens, **options) for tokens in (FEW, MANY))
    training = DTensorTraining(attention=attention)
    load = StageLoad(
        "train_sft",
        sizes_of(config),
        ClusterConfig(shape="cluster", num_workers=ranks),
        dtype,  # type: ignore[arg-type]
        0,
        MANY,
        training=TrainingLoad(training, MANY, "sft.max_tokens_per_microbatch", 1),
    )
    # The difference leaves out casts of weights, which do not depend on the tokens.
    counted = (many - few) / (MANY - FEW)
    assert layer_bytes(load, layout_of(training, ranks)) == pytest.approx(counted, rel=0.01)
