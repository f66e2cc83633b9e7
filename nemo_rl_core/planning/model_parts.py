"""Finds parts of any transformers model, and the lengths at which its values change."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from nemo_rl_core.errors import ModelError

if TYPE_CHECKING:
    import torch


_LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_ENCODERS: Final = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("xlm-roberta", "xlm-roberta-xl"),
)
"""Model types that are decoders only with `is_decoder: true`."""
_POSITIONS_AFTER_PADDING: Final = (
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl"),
)
"""Model types whose first position is one more than the id of the padding token."""
_LATER: Final = "its tokens attend to later ones"
_UNTRAINABLE: Final = {
    "hrm_text": "transformers cannot save it",
    "prophetnet": "its forward pass takes more than token ids",
    "rwkv": "its backward pass fails in transformers",
    "xlm": _LATER,
    "xlnet": _LATER,
    "xlstm": "its backward pass fails in transformers",
    "xmod": "its forward pass takes more than token ids",
}
_WITHOUT_GRADIENT: Final = {"crossattention", "encoder_attn", "indexer", "pooler"}
"""Modules without gradients from token ids: attention to an encoder, and selection of keys."""
_WITHOUT_ADAPTERS: Final = {
    "classifier": ("longcat_flash",),
    "dt_proj": ("falcon_mamba", "jamba", "mamba"),
    "out_proj": ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"),
}
"""Linear layers whose weight is read without a call, with the model types; peft refuses `out_proj`.
"""
_LENGTHS_OF_ROWS = ("attention_chunk_size", "index_topk", "keep_window_size")


def refuse_untrainable(config: Mapping[str, Any], *, called: str) -> None:
    """Refuses models that cannot be trained on tokens from left to right."""
    kind, text = str(config.get("model_type")), config.get("text_config") or config
    reason, fix = _UNTRAINABLE.get(kind), "choose another model"
    if kind in _ENCODERS and not config.get("is_decoder"):
        reason, fix = _LATER, "set is_decoder: true in its config.json"
    elif text.get("is_causal") is False or text.get("use_bidirectional_attention") in (True, "all"):
        reason, fix = (
            _LATER,
            "remove is_causal and use_bidirectional_attention from its config.json",
        )
    elif kind == "big_bird" and config.get("attention_type", "block_sparse") == "block_sparse":
        reason = "it computes full attention once it has seen a short sequence"
        fix = "set attention_type: original_full in its config.json"
    if reason is not None:
        raise ModelError(
            f"{called} cannot be trained",
            expected="a causal language model that transformers can train",
            got=f"model_type {kind}: {reason}",
            fix=fix,
        )


def decoder_of(model: Any) -> Any:
    """Returns the module that computes hidden states from token ids.

    In some classes `get_decoder` returns another module, such as the head or the model itself.
    """
    children = [each for each in model.children() if hasattr(each, "config")]
    candidates = (model.get_decoder(), model.base_model, *children)
    decoders = (each for each in candidates if each is not model and takes(each, "input_ids"))
    return next(decoders, model.get_decoder())


def layers_of(model: Any) -> "list[torch.nn.Module]":
    """Returns the decoder's layers: its module list with the most weights, or an empty list."""
    import torch

    lists = [each for each in decoder_of(model).modules() if isinstance(each, torch.nn.ModuleList)]
    sizes = [sum(weight.numel() for weight in each.parameters()) for each in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def adaptable_layers(model: Any) -> "dict[str, torch.nn.Module]":
    """Returns the linear layers by name that token ids train and that an adapter can change."""
    import torch
    from transformers.pytorch_utils import Conv1D

    kind, config = model.config.model_type, model.config.get_text_config()
    text_modules = {*decoder_of(model).modules(), model.get_output_embeddings()}
    image_layers = [f".layers.{i}." for i in getattr(config, "cross_attention_layers", None) or ()]
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear | Conv1D)
        and (layer in text_modules or config is model.config)
        and not any(part in name for part in image_layers)
        and not _WITHOUT_GRADIENT & {*name.split(".")}
        and kind not in _WITHOUT_ADAPTERS.get(name.rpartition(".")[2], ())
        and "Router" not in type(layer).__name__  # returns a tuple: Llama 4, PhiMoE
    }


def caps_logits(config: Any) -> bool:
    """Whether logits are capped after the head, as in Gemma 2."""
    text = config.get_text_config()
    return any(getattr(text, name, None) is not None for name in _LOGIT_CAPS)


def takes(module: Any, option: str) -> bool:
    """Whether a module's forward pass has a parameter of that name."""
    return option in inspect.signature(module.forward).parameters


def accepted(module: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that a module's forward pass accepts."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return options
    return {name: value for name, value in options.items() if takes(module, name)}


def longest_sequence(config: Any) -> int | None:
    """Returns the maximum sequence length in tokens, including position scaling; None if unknown.

    As in vLLM, `linear`, `dynamic` and `yarn` scaling multiply the length by a factor.
    """
    text = config.get_text_config()
    length: int | None = getattr(text, "max_position_embeddings", None)
    length = length or getattr(text, "max_seq_len", None)  # MPT's name
    if length is not None and text.model_type == "moshi":
        length = min(length, text.sliding_window)  # its cache is limited, but no mask is
    if length is not None and text.model_type in _POSITIONS_AFTER_PADDING:
        return length - (text.pad_token_id or 0) - 1
    rope = getattr(text, "rope_parameters", None) or {}
    if length is None or rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return length
    trained = rope.get("original_max_position_embeddings") or length
    return max(length, int(trained * (rope.get("factor") or 1)))


def rotary_length(config: Any) -> int | None:
    """Returns the length beyond which `dynamic` and `longrope` use other frequencies, else None."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    limits = []
    for kind in [each for each in rope.values() if isinstance(each, dict)] or [rope]:
        changes = any(kind.get(f"short_{x}") != kind.get(f"long_{x}") for x in ("factor", "mscale"))
        if kind.get("rope_type") == "longrope" and changes:
            limits.append(kind["original_max_position_embeddings"])
        elif kind.get("rope_type") == "dynamic":
            limits.append(text.max_position_embeddings)
    return min(limits, default=None)


def independent_length(config: Any) -> int | None:
    """Returns the length up to which sequences of a row do not affect each other; None for any.

    In longer rows, rotary frequencies depend on the longest sequence of a batch (`rotary_length`),
    `index_topk` or `keep_window_size` keys are chosen from the full row, and chunks or blocks of
    tokens are counted from its start.
    """
    text = config.get_text_config()
    limits = [rotary_length(config), *(getattr(text, name, None) for name in _LENGTHS_OF_ROWS)]
    if num_blocks := getattr(text, "index_topk_blocks", None):
        limits.append(num_blocks * text.index_block_size)
    return min((limit for limit in limits if limit is not None), default=None)


def reset_rotary(model: Any) -> None:
    """Resets rotary frequencies.

    `dynamic` ones stay at the values for the longest sequence so far; `longrope` ones by layer type
    fail at a second long pass.
    """
    import torch

    for part in model.modules():
        types = getattr(part, "rope_type", None)
        for each in types if isinstance(types, dict) else ():
            vars(part).pop(f"{each}_long_inv_freq", None)
        if "dynamic" not in str(types):
            continue
        for options in (
            [{"layer_type": each} for each in types] if isinstance(types, dict) else [{}]
        ):
            start = torch.zeros(1, 1, dtype=torch.long, device=next(part.buffers()).device)
            part(start.float(), start, **options)  # a sequence of one token is short enough


def reset_recurrent_states(model: Any) -> None:
    """Drops states that modules keep between prompts (RecurrentGemma)."""
    for part in model.modules():
        for name in ("conv1d_state", "recurrent_states"):
            if name in vars(part):
                setattr(part, name, None)
