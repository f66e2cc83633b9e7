"""Models of types beyond `FAMILIES`, built and converted by NVIDIA's Megatron-Bridge.

The pass over packed rows calls a chunk's embedding, decoder and head separately: models with other
parts, or with settings that only affect rows longer than a probe, are rejected.
`megatron_bridge_check` verifies the rest in every setup.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.megatron.attention import attention_classes
from nemo_rl_core.backends.training.megatron.families import STATIC_ROPE_TYPES
from nemo_rl_core.backends.training.megatron.layers import layers
from nemo_rl_core.backends.training.megatron.settings import (
    backend_settings,
    expert_settings,
    has_transformer_engine,
    refuse_remainders,
)
from nemo_rl_core.checkpoints.weight_files import open_weights, weight_files
from nemo_rl_core.checkpoints.weights import refuse_wrong_weights, require_finite
from nemo_rl_core.config.megatron_types import BRIDGE, BRIDGE_VERSION, bridge_version
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.errors import ConfigError, ModelError, NemoRLError
from nemo_rl_core.model_files.loading import empty_model, name_in_errors
from nemo_rl_core.model_files.weights import check_folder

_LOG = logging.getLogger(__name__)
_USE_DTENSOR = "use the dtensor backend, which trains any causal model of transformers"
_FUSIONS = ("persist_layer_norm", "bias_activation_fusion", "bias_dropout_fusion")
_PLAIN = {
    "fp16": False,
    "should_pad_vocab": False,
    "deallocate_pipeline_outputs": False,
    "moe_permute_fusion": False,
    "moe_z_loss_coeff": None,
    "moe_input_jitter_eps": None,
    "moe_expert_capacity_factor": None,
}
"""Settings that `backend_settings` leaves at Megatron's default, but a provider may change."""
_HEAD = "lm_head.weight"


def build_with_bridge(folder: Path, training: MegatronTraining, dtype: DType) -> list[Any]:
    """Builds the chunks of `model.build_model`, with the folder's `AutoBridge` as `bridge`."""
    hf_model = empty_model(folder, "lm")
    _refuse_hidden_settings(hf_model, folder)
    bridge = _bridge(folder, hf_model.config)
    with _errors_of_bridge(folder):
        provider = bridge.to_megatron_provider(load_weights=False)
        _refuse_indivisible(provider, training)
        _configure(provider, training, dtype, folder)
        chunks: list[Any] = provider.provide_distributed_model(
            wrap_with_ddp=False,
            use_cpu_initialization=not torch.cuda.is_available(),
            # Parameters already have the dtype, and a wrapper would cast the logits.
            mixed_precision_wrapper=None,
        )
    for chunk in chunks:
        _refuse_unknown_parts(chunk, folder)
        _use_frequencies(chunk, hf_model, folder)
        _drop_marks(chunk)
        chunk.bridge, chunk.hf_family, chunk.hf_config = bridge, None, hf_model.config
        chunk.takes_boundaries = False
    _LOG.warning(
        "%s %s builds and converts %r, of type %s",
        BRIDGE,
        bridge_version(),
        folder.name,
        hf_model.config.model_type,
    )
    return chunks


def load_with_bridge(chunks: list[Any], folder: Path) -> None:
    """Loads weights like `weights.load_hf_weights`, for the chunks of `build_with_bridge`."""
    check_folder(empty_model(folder, "lm"), folder)
    stored = {name for path in weight_files(folder) for name in open_weights(path).keys()}  # noqa: SIM118
    bridge = chunks[0].bridge
    tasks = bridge.get_conversion_tasks(chunks, folder)
    # The bridge skips weights that it has no rule for, with a warning.
    converted = {name for task in tasks if task is not None for name in _names(task)}
    is_tied = chunks[0].share_embeddings_and_output_weights
    surplus = stored - converted - ({_HEAD} if is_tied else set())
    refuse_wrong_weights(name_in_errors(folder), missing=converted - stored, surplus=surplus)
    if None in tasks:
        got = f"{tasks.count(None)} weights without a rule"
        raise _unfit(folder, "a conversion rule for every weight of the model", got)
    with _errors_of_bridge(folder):
        bridge.load_hf_weights(chunks, folder)
    for chunk in chunks:
        require_finite(name_in_errors(folder), chunk.named_parameters())


def _names(task: Any) -> list[str]:
    names = task.mapping.hf_param
    return [names] if isinstance(names, str) else list(names.values())


def export_with_bridge(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights of `weights.iter_hf_weights`, in the bridge's order."""
    is_tied = chunks[0].share_embeddings_and_output_weights
    exported = chunks[0].bridge.export_hf_weights(
        chunks, show_progress=False, merge_adapter_weights=False
    )
    for name, tensor in exported:
        if not (is_tied and name == _HEAD):
            yield name, tensor.detach()


def _bridge(folder: Path, hf_config: Any) -> Any:
    version = bridge_version()
    if version != BRIDGE_VERSION:
        raise ConfigError(
            f"the installed {BRIDGE} cannot build {folder.name!r}",
            expected=f"{BRIDGE} {BRIDGE_VERSION}, which the backend was written for",
            got=str(version),
            fix=f"install {BRIDGE}=={BRIDGE_VERSION} (docs/models.md)",
        )
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise ConfigError(
            f"{BRIDGE} {version} cannot be imported",
            expected="its dependencies, such as Transformer Engine",
            got=str(error),
            fix="install the dependencies listed in docs/models.md",
        ) from error
    try:
        bridge = AutoBridge.from_hf_pretrained(folder)
    except ValueError as error:
        raise _unfit(
            folder,
            "an architecture of " + ", ".join(sorted(AutoBridge.list_supported_models())),
            str(hf_config.architectures),
        ) from error
    # Set where transformers 4 had it; some of the bridge's translations would ignore the new field.
    config = bridge.hf_pretrained.config
    if "rope_theta" not in config.__dict__:
        config.rope_theta = hf_config.rope_parameters["rope_theta"]
    return bridge


@contextmanager
def _errors_of_bridge(folder: Path) -> Iterator[None]:
    try:
        yield
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, NemoRLError):
            raise
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _unfit(folder, "a model that it can build", got) from error


def _unfit(folder: Path, expected: str, got: str) -> ModelError:
    return ModelError(
        f"the megatron backend cannot build {folder.name!r} with {BRIDGE} {bridge_version()}",
        expected=expected,
        got=got,
        fix=_USE_DTENSOR,
    )


def _refuse_hidden_settings(hf_model: Any, folder: Path) -> None:
    """Raises for unsupported settings that do not change logprobs of the proof's short rows."""
    config = hf_model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    # The embedding of this token has no gradient.
    padding = getattr(hf_model.get_input_embeddings(), "padding_idx", None)
    for name, value, is_supported in (
        ("rope_type", rope, rope in STATIC_ROPE_TYPES),
        ("sliding_window", window, not window),
        ("attention_chunk_size", chunk, not chunk),
        ("layer_types", kinds, kinds in ([], ["full_attention"])),
        ("padding_idx", padding, padding == config.pad_token_id),
    ):
        if not is_supported:
            raise _unfit(
                folder,
                "full attention, static rope, and no gradient for the padding token's embedding",
                f"{name}={value}",
            )


def _refuse_indivisible(provider: Any, training: MegatronTraining) -> None:
    setting, tensor = "tensor_parallel_size", training.tensor_parallel_size
    refuse_remainders(
        [
            ("attention heads", provider.num_attention_heads, setting, tensor),
            ("key/value heads", provider.num_query_groups, setting, tensor),
            ("intermediate size", provider.ffn_hidden_size, setting, tensor),
            # The bridge's rules do not support padding.
            ("rows of the vocabulary", provider.vocab_size, setting, tensor),
        ],
        provider.num_layers,
        provider.num_moe_experts,
        training,
    )


def _configure(provider: Any, training: MegatronTraining, dtype: DType, folder: Path) -> None:
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    settings = {**_PLAIN, **backend_settings(training, dtype)}
    # Not every activation and norm has a fused kernel.
    settings |= {name: settings[name] and getattr(provider, name) for name in _FUSIONS}
    if provider.num_moe_experts:
        settings |= expert_settings()
    if not has_transformer_engine():
        if (
            provider.transformer_layer_spec is not GPTModelProvider.transformer_layer_spec
            or provider.normalization != "RMSNorm"
            or provider.layernorm_zero_centered_gamma
        ):
            raise _unfit(
                folder,
                "Transformer Engine and a GPU, or layers that Megatron-core supports without them",
                f"{type(provider).__name__} without a GPU",
            )
        settings["transformer_layer_spec"] = layers
    for name, value in settings.items():
        if not hasattr(provider, name):
            raise _unfit(folder, f"a provider with the setting {name}", type(provider).__name__)
        setattr(provider, name, value)
    provider.finalize()


def _refuse_unknown_parts(chunk: Any, folder: Path) -> None:
    """Raises unless the pass over packed rows supports a chunk; see `packed` and `heads`."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.transformer_block import TransformerBlock

    parts: list[tuple[str, Any, type]] = [
        ("model", chunk, GPTModel),
        ("rope", getattr(chunk, "rotary_pos_emb", None), RotaryEmbedding),
        ("decoder", getattr(chunk, "decoder", None), TransformerBlock),
    ]
    if getattr(chunk, "post_process", False):
        # Only its weight is used.
        parts.append(("head", getattr(chunk, "output_layer", None), ColumnParallelLinear))
    for what, part, expected in parts:
        if type(part) is not expected:
            raise _unfit(folder, f"a {what} of type {expected.__name__}", type(part).__name__)
    kernels = attention_classes()
    for name, module in chunk.named_modules():
        if name.endswith(".core_attention") and type(module) not in kernels:
            got = type(module).__name__
            raise _unfit(folder, "attention that separates packed sequences", got)
    # The reference only swaps parameters and would keep the policy's buffers.
    parameters = {name for name, _ in chunk.named_parameters()}
    kept = [
        name
        for name in chunk.state_dict()
        if name not in parameters and not name.endswith("_extra_state")
    ]
    if kept or getattr(chunk.config, "mtp_num_layers", None):
        got = kept[0] if kept else f"mtp_num_layers={chunk.config.mtp_num_layers}"
        raise _unfit(folder, "a model without saved buffers, with one head", got)


def _drop_marks(chunk: Any) -> None:
    """Removes the marks with which the bridge calls all parameters replicated, even split ones.

    `optimizer.wrap` then marks split parameters for the gradient norm.
    """
    from megatron.core.tensor_parallel.layers import _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS

    for parameter in chunk.parameters():
        if not getattr(parameter, "tensor_model_parallel", True):
            for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
                delattr(parameter, name)


def _use_frequencies(chunk: Any, hf_model: Any, folder: Path) -> None:
    """Sets the rotary frequencies of transformers in a chunk.

    The bridge lets Megatron scale them, with different constants, and uses a base of 10,000 if the
    config has it in a different field.
    """
    rope = getattr(hf_model.base_model, "rotary_emb", None)
    frequencies = getattr(rope, "inv_freq", None)
    current = chunk.rotary_pos_emb.inv_freq
    scaling = getattr(rope, "attention_scaling", 1.0)
    if frequencies is None or frequencies.shape != current.shape or scaling != 1.0:
        shape = None if frequencies is None else tuple(frequencies.shape)
        raise _unfit(
            folder,
            f"{tuple(current.shape)} rotary frequencies and no scaled attention",
            f"{shape} frequencies, scaled by {scaling}",
        )
    chunk.rotary_pos_emb.inv_freq = frequencies.detach().clone().to(current)
