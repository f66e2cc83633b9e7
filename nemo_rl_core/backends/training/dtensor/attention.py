"""Choice of the attention kernel for packed rows, and its registration with transformers.

The kernel gets sequence boundaries the same way as FlashAttention in transformers: from the
decoder's options `cu_seq_lens_q` and `max_length_q`, which models pass to every layer. A forward
pass without them, such as generation, uses transformers' default attention.
"""

import logging
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from nemo_rl_core.backends.experimental.flash_attention import Heads, choose_version
from nemo_rl_core.backends.training.dtensor.microbatches import PackedTokens
from nemo_rl_core.backends.training.packed_attention import (
    KERNELS,
    KernelName,
    Segments,
    block_mask,
    unsupported_reasons,
)
from nemo_rl_core.checkpoints.weights import caps_scores
from nemo_rl_core.config.training import DTensorTraining, kernel_wanted
from nemo_rl_core.data.pretrained import shares_rows
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.planning.model_parts import decoder_of

_LOG = logging.getLogger(__name__)
_LAYERS = {"full_attention", "sliding_attention"}


class PackedAttention:
    """An attention kernel over packed rows, set up in a model's decoder in place."""

    def __init__(self, model: Any, kernel: KernelName) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        self.kernel = kernel
        config = decoder_of(model).config
        name = f"packed_{kernel}"
        AttentionInterface.register(name, partial(_attend, kernel))
        AttentionMaskInterface.register(name, sdpa_mask)
        config._attn_implementation = name
        self._windows = _windows(config)

    @property
    def takes_trees(self) -> bool:
        """Whether sequences in a row may share prefixes."""
        return self.kernel != "varlen"

    def inputs(self, rows: PackedTokens) -> dict[str, Any]:
        """Returns the decoder's options.

        Ignores windows in a prefix tree, none of whose sequences is longer than a window.
        """
        options: dict[str, Any] = {
            # Transformers does not create a mask if it gets one with four dimensions.
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=rows.last.device),
            "cu_seq_lens_q": rows.boundaries,
            "cu_seq_lens_k": rows.boundaries,
            "max_length_q": rows.longest,
            "max_length_k": rows.longest,
        }
        num_rows, length = rows.last.shape
        starts = torch.arange(0, num_rows * length, length, device=rows.last.device)
        last = (rows.last + starts[:, None]).flatten().int()
        if rows.is_tree:
            options["last_to_attend"] = last
        if self.kernel == "flex":
            options["block_masks"] = {
                window: block_mask(last, None if rows.is_tree else window)
                for window in self._windows
            }
        return options


def packed_attention(
    model: Any, training: DTensorTraining, *, dtype: str, device: torch.device
) -> PackedAttention | None:
    """Sets up the kernel that the settings choose; None for transformers' default attention.

    `auto` chooses `varlen`, else `flex`, on GPUs, and transformers' default attention on CPUs and
    for models that neither kernel supports.
    """
    requested = kernel_wanted(training)
    if requested == "sdpa" or (requested == "auto" and device.type != "cuda"):
        return None
    reasons = partial(
        _unsupported_reasons, model, training, dtype=getattr(torch, dtype), device=device
    )
    candidates = [each for each in _FAST if requested in ("auto", each)]
    kernel = next((each for each in candidates if not reasons(each)), None)
    if kernel is not None:
        if requested == "auto":
            _LOG.warning("training.attention: auto chose %s for %s", kernel, type(model).__name__)
        if kernel == "varlen":
            heads = _heads(model.config.get_text_config(), getattr(torch, dtype), device)
            choose_version(training.flash_attention, heads)
        return PackedAttention(model, kernel)
    if requested != "auto":
        usable = [name for name in _FAST if not reasons(name)]
        raise ConfigError(
            f"training.attention: {requested} does not support {type(model).__name__}",
            expected="auto, or one of " + ", ".join([*usable, "sdpa"]),
            got="; ".join(reasons(cast(KernelName, requested))),
            fix="leave training.attention out; auto chooses the fastest kernel for this model here",
        )
    _LOG.warning(
        "training.attention: auto chose sdpa for %s, with a mask of all pairs of tokens: %s",
        type(model).__name__,
        "; ".join(dict.fromkeys(reason for kernel in _FAST for reason in reasons(kernel))),
    )
    return None


_FAST: tuple[KernelName, KernelName] = ("varlen", "flex")


def _unsupported_reasons(
    model: Any,
    training: DTensorTraining,
    kernel: KernelName,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[str]:
    config = model.config.get_text_config()
    reasons = []
    if training.context_parallel_size > 1:
        reasons.append("context_parallel_size splits rows, so attention has to gather keys")
    if not shares_rows(model.config.to_dict()):
        reasons.append("the model reads images, so its rows are not packed")
    default = decoder_of(model).config._attn_implementation
    if default != "sdpa" and not str(default).startswith("packed_"):
        reasons.append(f"transformers computes this model with a different attention, {default!r}")
    if not getattr(model, "_supports_attention_backend", False):
        reasons.append("the model does not pass sequence boundaries to its attention")
    if others := set(getattr(config, "layer_types", None) or ()) - _LAYERS:
        reasons.append(f"layers of {', '.join(sorted(others))}")
    if getattr(config, "is_heterogeneous", False):
        reasons.append("layers of different shapes")
    if caps_scores(config):
        reasons.append("attn_logit_softcapping, which the kernels do not support")
    if not getattr(config, "is_causal", True):
        reasons.append("attention in both directions")
    return reasons or unsupported_reasons(
        kernel,
        device=device,
        dtype=dtype,
        head_sizes=_head_sizes(config),
        windowed=_windows(config) != {None},
    )


def _heads(config: Any, dtype: torch.dtype, device: torch.device) -> Heads:
    num_heads = int(config.num_attention_heads)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    (size,) = _head_sizes(config)
    return Heads(device, dtype, size, num_heads // num_kv_heads, frozenset(_windows(config)))


def _head_sizes(config: Any) -> set[int]:
    declared = getattr(config, "head_dim", None)
    size = int(declared or config.hidden_size // config.num_attention_heads)
    # Latent attention (MLA) declares one size for queries and keys, and another for values.
    sizes = (getattr(config, name, None) for name in ("qk_head_dim", "v_head_dim"))
    return {int(each) for each in sizes if each} or {size}


def _windows(config: Any) -> set[int | None]:
    """Returns the window sizes of the layers; None means full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:  # one setting for all layers
        return {window if getattr(config, "use_sliding_window", True) else None}
    return {window if kind == "sliding_attention" else None for kind in kinds}


def _attend(
    kernel: KernelName,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface: `[R, H, L, E]` query, `[R, L, H, E]` result."""
    boundaries = options.get("cu_seq_lens_q")
    if boundaries is None:
        return _attend_by_mask(module, query, key, value, attention_mask, options)
    _refuse_unknown(module, options)
    last = options.get("last_to_attend")
    segments = Segments(boundaries, options["max_length_q"], options.get("block_masks"), last)
    window = _window_of(module, options, segments)
    kind = query.device.type
    # Rotary embeddings may change the dtype of queries and keys, but not that of values; autocast
    # only affects torch's operators.
    is_cast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_cast else value.dtype
    num_rows, num_heads, row_length, _ = query.shape
    query, key, value = (
        part.transpose(1, 2).flatten(end_dim=1).to(dtype) for part in (query, key, value)
    )
    scale = options.get("scaling")
    attended = KERNELS[kernel](query, key, value, segments, scale=scale, window=window)
    return attended.view(num_rows, row_length, num_heads, -1), None


def _window_of(module: Any, options: dict[str, Any], segments: Segments) -> int | None:
    # Some models only apply their window in the mask.
    window: int | None = options.get("sliding_window") or getattr(module, "sliding_window", None)
    if segments.masks is not None and window not in segments.masks:
        raise ModelError(
            f"{type(module).__name__} attends within a window that its config does not declare",
            expected=f"windows {sorted(map(str, segments.masks))}",
            got=str(window),
            fix="set training.attention to sdpa",
        )
    return window


def _attend_by_mask(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if mask is not None and mask.shape[-1] == 1 < key.shape[2]:
        raise ModelError(
            f"{type(module).__name__} did not get the boundaries of packed sequences",
            expected="a model that passes the options of its decoder to attention",
            got="attention without cu_seq_lens_q",
            fix="set training.attention to sdpa",
        )
    attended: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, mask, **options
    )
    return attended


def _refuse_unknown(module: Any, options: dict[str, Any]) -> None:
    """Raises `ModelError` for options that change attention but that no kernel supports."""
    changes = {name: options.get(name) for name in ("softcap", "s_aux", "position_bias")}
    unsupported = [name for name, value in changes.items() if value is not None]
    if options.get("dropout"):
        unsupported.append("dropout")
    if unsupported:
        raise ModelError(
            f"{type(module).__name__} passes {', '.join(unsupported)} to its attention",
            expected="attention that only scales its scores",
            got=", ".join(unsupported),
            fix="set training.attention to sdpa",
        )
