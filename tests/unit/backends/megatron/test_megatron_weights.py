"""Megatron's models compared with transformers': identical weights, logits within rounding."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl_core.config.megatron_types import MEGATRON_TYPES
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.distributed.local_ranks import run_ranks

# 49 tokens: not a multiple of two tensor ranks. Two query groups of two heads.
SHAPE: dict[str, Any] = {
    "vocab_size": 49,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "llama-linear": LlamaConfig(
        **SHAPE,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3_moe-unnormed": Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "mixtral": MixtralConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
}
SMALL = {**SHAPE, "num_hidden_layers": 2}
ONE_HEAD = {**SMALL, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
VARIANTS: dict[str, PreTrainedConfig] = {
    "llama, one key head": LlamaConfig(**ONE_HEAD, tie_word_embeddings=True),
    "llama, other widths": LlamaConfig(
        **SMALL | {"num_key_value_heads": 4, "intermediate_size": 47},
        head_dim=24,
        rope_parameters=LINEAR_ROPE,
        rms_norm_eps=1e-3,
    ),
    "qwen2, llama3 rope": Qwen2Config(**SMALL, rope_parameters=LLAMA3_ROPE),
    "qwen2, one key head": Qwen2Config(**ONE_HEAD, head_dim=16, tie_word_embeddings=True),
    "qwen3, llama3 rope": Qwen3Config(**SMALL, head_dim=24, rope_parameters=LLAMA3_ROPE),
    "qwen3, one key head": Qwen3Config(**ONE_HEAD, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe, every second layer": Qwen3MoeConfig(
        **SMALL,
        **EXPERTS,
        num_experts_per_tok=3,
        decoder_sparse_step=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
    "qwen3_moe, no sparse layer": Qwen3MoeConfig(
        **ONE_HEAD, **EXPERTS, num_experts_per_tok=4, mlp_only_layers=[0, 1]
    ),
    "qwen3_moe, no experts": Qwen3MoeConfig(**SMALL, **EXPERTS | {"num_experts": 0}),
    "qwen3_moe, all experts": Qwen3MoeConfig(
        **SMALL, **EXPERTS, num_experts_per_tok=4, rope_parameters=LINEAR_ROPE
    ),
    "qwen3_moe, one expert": Qwen3MoeConfig(
        **SMALL, **EXPERTS, num_experts_per_tok=1, norm_topk_prob=True
    ),
    "qwen3_moe, one expert, unnormed": Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts_per_tok=1),
    "mixtral, one expert": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=1),
    "mixtral, three experts": MixtralConfig(
        **ONE_HEAD,
        num_local_experts=5,
        num_experts_per_tok=3,
        head_dim=16,
        rope_parameters=LLAMA3_ROPE,
        tie_word_embeddings=True,
    ),
}
DENSE_LAYOUTS = {
    "1x1": MegatronTraining(),
    "2x1": MegatronTraining(tensor_parallel_size=2),
    "1x2": MegatronTraining(pipeline_parallel_size=2),
    "2x2": MegatronTraining(tensor_parallel_size=2, pipeline_parallel_size=2),
    "1x2 interleaved": MegatronTraining(pipeline_parallel_size=2, virtual_pipeline_size=2),
    "2x1 sequence": MegatronTraining(tensor_parallel_size=2, sequence_parallel=True),
}
MOE_LAYOUTS = {
    "1x1": MegatronTraining(),
    "experts 2": MegatronTraining(expert_parallel_size=2),
    "1x2 experts 2": MegatronTraining(pipeline_parallel_size=2, expert_parallel_size=2),
}
IDS = torch.randint(0, 49, (2, 12), generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Comparison:
    """Results of one rank for one model at one layout."""

    num_weights: int
    unequal: list[str]
    logits_error: float


def saved(config: PreTrainedConfig, folder: Path, **options: Any) -> Any:
    """Saves a model with random weights, norms and biases included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.rand_like(weight))
    model.save_pretrained(folder, **options)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        # Several files, so that the index is also read.
        model = saved(config, root / name, max_shard_size="40kB")
        torch.save(model(input_ids=IDS).logits.detach(), root / name / "logits.pt")
    return {name: root / name for name in MODELS}


def plan() -> list[tuple[str, str, MegatronTraining]]:
    return [
        (name, label, training)
        for name, config in MODELS.items()
        for label, training in (
            MOE_LAYOUTS if hasattr(config, "num_experts_per_tok") else DENSE_LAYOUTS
        ).items()
    ]


def megatron_logits(chunks: list[Any]) -> torch.Tensor | None:
    """Returns `[B, T, V]` logits on the last stage, else None, through Megatron's schedule."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    mask = torch.ones(1, 1, IDS.shape[1], IDS.shape[1]).triu(1).bool()
    positions = torch.arange(IDS.shape[1])[None]

    def step(rows: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        return model(next(rows), positions, mask), lambda output, non_loss_data: output

    # One row per micro-batch, as many as there are stages, which interleaving requires.
    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(IDS[:, None]) for _ in chunks],
        model=chunks,
        num_microbatches=len(IDS),
        seq_length=IDS.shape[1],
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not parallel_state.is_pipeline_last_stage():
        return None
    return gather_from_tensor_model_parallel_region(torch.cat(outputs))[..., :49]


def compare(folder: Path, training: MegatronTraining) -> Comparison:
    from safetensors import safe_open

    from nemo_rl_core.backends.training.megatron.model import build_model
    from nemo_rl_core.backends.training.megatron.topology import initialize_topology
    from nemo_rl_core.backends.training.megatron.weights import iter_hf_weights, load_hf_weights

    initialize_topology(training)
    chunks = build_model(folder, training)
    load_hf_weights(chunks, folder)
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    exported = dict(iter_hf_weights(chunks))
    unequal = sorted(files.keys() ^ exported.keys())
    for name, file in files.items():
        with safe_open(folder / file, framework="pt") as tensors:
            if name in exported and not torch.equal(exported[name], tensors.get_tensor(name)):
                unequal.append(name)
    with torch.no_grad():
        logits = megatron_logits(chunks)
    expected = torch.load(folder / "logits.pt")
    error = 0.0 if logits is None else ((logits - expected).norm() / expected.norm()).item()
    return Comparison(len(exported), unequal, error)


@pytest.mark.thorough
def test_every_architecture_and_layout_equals_transformers(folders: dict[str, Path]) -> None:
    """All use one set of ranks; data parallelism gets those that a layout does not use."""

    def compare_all() -> dict[tuple[str, str], Comparison]:
        return {(name, label): compare(folders[name], layout) for name, label, layout in plan()}

    for results in run_ranks(compare_all, world_size=4):
        for case, result in results.items():
            assert result.unequal == [], case
            assert result.num_weights >= 38, case
            assert result.logits_error < 1e-5, case
        assert len(results) == len(plan())


Tensors = dict[str, torch.Tensor]


def exported_with_gradients(folder: Path) -> tuple[torch.Tensor, Tensors, Tensors]:
    """Returns logits, weights under transformers' names, and their gradients."""
    from nemo_rl_core.backends.training.megatron.model import build_model
    from nemo_rl_core.backends.training.megatron.topology import (
        initialize_topology,
        tear_down_topology,
    )
    from nemo_rl_core.backends.training.megatron.weights import iter_hf_weights, load_hf_weights

    initialize_topology(MegatronTraining())
    chunks = build_model(folder, MegatronTraining())
    load_hf_weights(chunks, folder)
    mask = torch.ones(1, 1, IDS.shape[1], IDS.shape[1]).triu(1).bool()
    weights = {name: weight.clone() for name, weight in iter_hf_weights(chunks)}
    logits = chunks[0](IDS, torch.arange(IDS.shape[1])[None], mask)
    logits.log_softmax(-1)[..., 3].sum().backward()
    for parameter in chunks[0].parameters():
        parameter.data = parameter.grad
    gradients = {name: grad.clone() for name, grad in iter_hf_weights(chunks)}
    tear_down_topology()
    return logits.detach(), weights, gradients


@pytest.mark.parametrize("name", VARIANTS)
def test_config_gives_the_weights_logits_and_gradients_of_transformers(
    tmp_path: Path, name: str
) -> None:
    model = saved(VARIANTS[name], tmp_path)
    logits, weights, gradients = exported_with_gradients(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == stored.keys()
    assert [each for each, weight in weights.items() if not torch.equal(weight, stored[each])] == []
    expected = model(input_ids=IDS).logits
    expected.log_softmax(-1)[..., 3].sum().backward()
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    named = {name: weight.grad for name, weight in model.named_parameters()}
    # Experts are separate, as they are published.
    published = revert_weight_conversion(model, named)
    assert gradients.keys() == published.keys()
    scale = max(grad.abs().max() for grad in published.values())
    for weight, grad in published.items():
        torch.testing.assert_close(gradients[weight], grad, atol=1e-5 * scale, rtol=1e-5)


IGNORED = {
    *("attention_dropout", "router_jitter_noise"),  # dropout is off
    *("initializer_range", "max_position_embeddings"),  # weights are loaded, ropes are static
    *("output_router_logits", "router_aux_loss_coef"),  # `warn_of_balancing_loss`
    "_attn_implementation",
}
TRANSLATED = {
    *("attention_bias", "mlp_bias", "hidden_act", "layer_types", "sliding_window"),  # `family_of`
    *("hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters", "pad_token_id"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"),
}


@pytest.mark.parametrize("kind", sorted(MEGATRON_TYPES))
def test_every_config_field_that_transformers_reads_is_listed(kind: str) -> None:
    """A new field that a later version of transformers reads would be silently ignored."""
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    source = inspect.getsource(module)
    read = set(re.findall(r"config\.([a-z_]+)\b(?!\()", source))
    read |= set(re.findall(r"getattr\((?:self\.)?config, \"([a-z_]+)\"", source))
    assert len(read) > 10
    assert read - IGNORED - TRANSLATED == set()
