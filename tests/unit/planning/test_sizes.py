"""Counts of weights, against the classes of transformers on torch's meta device."""

import json
from typing import Any

import pytest
import torch

from nemo_rl_core.errors import ModelError
from nemo_rl_core.planning.sizes import KNOWN_TYPES, ModelSizes, sizes_of
from tests.unit.planning.layouts import CONFIGS, sizes

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def on_meta(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values)
        )


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # As their model cards have them.
        ("qwen2.5-1.5b", 1.54),
        ("qwen2.5-7b", 7.62),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("qwen3-30b-a3b", 30.53),
    ],
)
def test_published_models_have_the_weights_of_their_class(name: str, billions: float) -> None:
    config = json.loads(CONFIGS[name].read_text())
    result = sizes(name)
    assert result.num_parameters == count(on_meta(config))
    assert round(result.num_parameters / 1e9, 2) == billions
    assert result.is_exact


@pytest.mark.parametrize(
    "config",
    [
        *({**TINY, "model_type": name} for name in sorted(KNOWN_TYPES - {"qwen3_moe"})),
        {**TINY, "model_type": "qwen2", "tie_word_embeddings": True},
        {**TINY, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {**TINY, "model_type": "qwen3", "attention_bias": True},
        {**TINY, "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
        {**TINY, **EXPERTS, "model_type": "qwen3_moe"},
        {**TINY, **EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [1]},
        {**TINY, **EXPERTS, "model_type": "qwen3_moe", "decoder_sparse_step": 2},
        {**TINY, "model_type": "gemma2"},
        {**TINY, "model_type": "olmo2", "pad_token_id": 0, "eos_token_id": 1},
    ],
    ids=lambda config: "-".join([config["model_type"], *sorted(set(config) - set(TINY))][:3]),
)
def test_variants_have_the_weights_of_their_class(config: dict[str, Any]) -> None:
    if config["model_type"] == "mixtral":
        config = {"num_local_experts": 8, "num_experts_per_tok": 2, **config}
    found, model = sizes_of(config), on_meta(config)
    layers = model.get_decoder().layers
    assert found.num_parameters == pytest.approx(count(model), rel=1e-12)
    assert found.layer_weights * len(layers) == pytest.approx(count(layers), rel=1e-12)
    assert found.largest_weight == max(p.numel() for p in model.parameters())
    assert found.is_exact == (config["model_type"] in KNOWN_TYPES)


def test_built_model_has_the_counted_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways agree, so that models of other types are counted as those of known ones."""
    from nemo_rl_core.planning import sizes as module

    for config in (
        {**TINY, "model_type": "qwen3"},
        {**TINY, **EXPERTS, "model_type": "qwen3_moe"},
    ):
        counted = vars(sizes_of(config))
        monkeypatch.setattr(module, "KNOWN_TYPES", frozenset())
        built = vars(sizes_of(config))
        monkeypatch.undo()
        assert {name for name in counted if counted[name] != built[name]} == {"is_exact"}


def test_active_weights_are_those_of_the_chosen_experts_and_the_head() -> None:
    # 3.34 B are active; the embedding of 0.31 B is only looked up.
    flops = sizes("qwen3-30b-a3b").flops
    assert flops.num_multiplied / 1e9 == pytest.approx(3.34 - 0.31, abs=0.02)
    dense = sizes("qwen2.5-7b")
    assert flops.num_layers == 48
    assert dense.flops.num_multiplied == pytest.approx(
        dense.num_parameters - dense.vocabulary * dense.hidden, rel=1e-3
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen2", "hidden_size": 8}, "has no 'num_attention_heads'"),
        (
            {"model_type": "no_such_type"},
            "transformers cannot build a model of the type 'no_such_type'",
        ),
        ({}, "transformers cannot build a model"),
    ],
)
def test_a_config_without_sizes_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as refused:
        sizes_of(config)
    assert "--model-config" in str(refused.value)


def test_widths_by_hand() -> None:
    result: ModelSizes = sizes("llama-3.1-8b")
    assert (result.queries, result.keys, result.mlp_width) == (4096, 1024, 14336)
    assert result.replicated_weights == 2 * 4096
    assert result.largest_weight == 128256 * 4096
