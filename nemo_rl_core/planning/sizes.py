"""Sizes of a model, computed from its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.errors import ModelError
from nemo_rl_core.planning.model_parts import layers_of
from nemo_rl_core.telemetry.model_flops import ModelFlops

_BIASED = frozenset({"qwen2"})
_NORMED_HEADS = frozenset({"qwen3", "qwen3_moe"})
_DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_SPARSE = frozenset({"mixtral", "qwen3_moe"})
KNOWN_TYPES = _DENSE | _SPARSE
"""Model types whose weights and activations are counted by formula. Other models are built on the
meta device, and their activations are estimated."""


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of weights, and widths of activations and caches.

    Attributes:
        vocabulary: Number of rows of the head.
        mlp_width: Width of the MLP per token; for a mixture of experts, of all active experts.
        layer_weights: Mean number of weights per layer.
        linear_weights: Weights of linear layers other than experts, per layer.
        replicated_weights: Weights per layer that tensor parallelism does not split: norms.
        outer_weights: Weights of embedding, head and everything else outside the layers.
        is_exact: Whether the type is one of `KNOWN_TYPES`.
    """

    model_type: str
    num_layers: int
    hidden: int
    vocabulary: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_width: int
    layer_weights: float
    expert_weights: float
    linear_weights: float
    replicated_weights: float
    outer_weights: float
    largest_weight: float
    is_tied: bool
    has_head_norms: bool
    num_experts: int = 0
    experts_per_token: int = 0
    is_exact: bool = True

    @property
    def num_parameters(self) -> float:
        """Number of weights, counting tied ones once."""
        return self.num_layers * self.layer_weights + self.outer_weights

    @property
    def queries(self) -> int:
        """Total width of a token's queries."""
        return self.num_heads * self.head_size

    @property
    def keys(self) -> int:
        """Total width of a token's keys, and of its values."""
        return self.num_kv_heads * self.head_size

    @property
    def num_tensors(self) -> int:
        """Number of tensors in a checkpoint; approximate unless `is_exact`."""
        mlp = 1 + 3 * self.num_experts if self.num_experts else 3
        attention = 4 + 3 * (self.model_type in _BIASED) + 2 * self.has_head_norms
        return self.num_layers * (attention + mlp + 2) + 2 + (not self.is_tied)

    @property
    def flops(self) -> ModelFlops:
        """Inputs for counting FLOPs; see `nemo_rl_core.telemetry.model_flops`."""
        active = self.experts_per_token / self.num_experts if self.num_experts else 1.0
        layer = self.layer_weights - self.expert_weights * (1 - active)
        head = self.vocabulary * self.hidden
        return ModelFlops(self.num_layers * layer + head, self.num_layers, self.queries)


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """Counts a model's weights."""
    text: Mapping[str, Any] = config.get("text_config") or config
    model_type = str(text.get("model_type", "unknown"))
    if model_type in KNOWN_TYPES and text is config:
        return _by_formula(model_type, text)
    return _by_meta_device(config)


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise ModelError(
        f"the model's config has no {names[0]!r}",
        expected="the config.json of a decoder: hidden_size, num_hidden_layers, "
        "num_attention_heads, vocab_size",
        got=", ".join(sorted(config)[:12]) or "nothing",
        fix="plan with the config.json of the model: nemo-rl plan RECIPE --model-config FILE",
    )


def _head_size(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    return int(config.get("head_dim") or hidden // heads)


def _by_formula(model_type: str, config: Mapping[str, Any]) -> ModelSizes:
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size, layers = _head_size(config, hidden, heads), _number(config, "num_hidden_layers")
    queries, keys = heads * size, kv_heads * size
    vocabulary = _number(config, "vocab_size")
    has_bias = model_type in _BIASED or bool(config.get("attention_bias"))
    attention = 2 * hidden * (queries + keys) + (queries + 2 * keys) * has_bias
    attention += hidden * (has_bias and model_type not in _BIASED)  # the output bias
    norms = 2 * hidden + 2 * size * (model_type in _NORMED_HEADS)
    experts, per_token = _experts(model_type, config)
    width = _number(config, "moe_intermediate_size", "intermediate_size") if experts else 0
    sparse = _num_sparse_layers(model_type, config, layers) / layers if experts else 0.0
    dense_width = _number(config, "intermediate_size")
    mlp = 3 * hidden * dense_width + (2 * dense_width + hidden) * bool(config.get("mlp_bias"))
    expert_weights = sparse * experts * 3 * hidden * width
    router = sparse * experts * hidden
    linear = attention + (1 - sparse) * mlp + router
    is_tied = bool(config.get("tie_word_embeddings", False))
    return ModelSizes(
        model_type=model_type,
        num_layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        mlp_width=round(sparse * per_token * width + (1 - sparse) * dense_width),
        layer_weights=linear + norms + expert_weights,
        expert_weights=expert_weights,
        linear_weights=linear,
        replicated_weights=norms,
        outer_weights=vocabulary * hidden * (1 if is_tied else 2) + hidden,
        largest_weight=max(vocabulary * hidden, 2 * experts * hidden * width),
        is_tied=is_tied,
        has_head_norms=model_type in _NORMED_HEADS,
        num_experts=experts,
        experts_per_token=per_token,
    )


def _experts(model_type: str, config: Mapping[str, Any]) -> tuple[int, int]:
    if model_type not in _SPARSE:
        return 0, 0
    experts = _number(config, "num_experts", "num_local_experts")
    return experts, _number(config, "num_experts_per_tok")


def _num_sparse_layers(model_type: str, config: Mapping[str, Any], layers: int) -> int:
    if model_type == "mixtral":
        return layers
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


_MLP_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
"""Config keys of the MLP width; without any it is 4 times the hidden size."""


def _mlp_width(text: Mapping[str, Any], hidden: int) -> int:
    width = next((text[name] for name in _MLP_WIDTHS if text.get(name)), 4 * hidden)
    return int(max(width) if isinstance(width, list | tuple) else width)


def _by_meta_device(config: Mapping[str, Any]) -> ModelSizes:
    model = _empty(config)
    described = model.config.get_text_config()
    text = described.to_dict()
    text |= {alias: text[name] for alias, name in described.attribute_map.items() if name in text}
    hidden, heads = _number(text, "hidden_size"), int(text.get("num_attention_heads") or 1)
    layers = layers_of(model)
    layer_parameters = [(name, p) for layer in layers for name, p in layer.named_parameters()]
    total = sum(p.numel() for p in model.parameters())
    num_in_layers = sum(p.numel() for _, p in layer_parameters)
    experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
    per_token = int(text.get("num_experts_per_tok") or 0)
    num_in_experts = sum(p.numel() for name, p in layer_parameters if ".experts." in name)
    num_in_vectors = sum(p.numel() for _, p in layer_parameters if p.dim() == 1)
    head, count = model.get_output_embeddings(), len(layers)
    width = int(text.get("moe_intermediate_size") or 0) * per_token
    return ModelSizes(
        model_type=str(text.get("model_type", "unknown")),
        num_layers=count,
        hidden=hidden,
        vocabulary=_number(text, "vocab_size"),
        num_heads=heads,
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_size=_head_size(text, hidden, heads),
        mlp_width=width or _mlp_width(text, hidden),
        layer_weights=num_in_layers / count,
        expert_weights=num_in_experts / count,
        linear_weights=(num_in_layers - num_in_experts - num_in_vectors) / count,
        replicated_weights=num_in_vectors / count,
        outer_weights=total - num_in_layers,
        largest_weight=max(p.numel() for p in model.parameters()),
        is_tied=head is not None and head.weight is model.get_input_embeddings().weight,
        has_head_norms=any("q_norm" in name for name, _ in layer_parameters),
        num_experts=experts,
        experts_per_token=per_token,
        is_exact=False,
    )


def _empty(config: Mapping[str, Any]) -> Any:
    from accelerate import init_empty_weights  # type: ignore[import-untyped]
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    values = {name: value for name, value in config.items() if name != "model_type"}
    architecture = str((config.get("architectures") or [""])[0])
    has_images = architecture.endswith("ForConditionalGeneration")
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    try:
        described = AutoConfig.for_model(str(config.get("model_type")), **values)
        with init_empty_weights():
            model = kind.from_config(described)
        model.tie_weights()
    except (ValueError, AttributeError, KeyError, TypeError, StrictDataclassError) as error:
        raise ModelError(
            f"transformers cannot build a model of the type {config.get('model_type')!r}",
            expected="the config.json of a causal language model",
            got=str(error).splitlines()[0][:200],
            fix="correct model_type, or plan with another --model-config",
        ) from error
    return model
