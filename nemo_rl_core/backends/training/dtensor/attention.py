"""Which kernel attends over packed rows, and its registration with transformers.

Sequence boundaries reach the kernel as transformers passes them to FlashAttention: the options
`cu_seq_lens_q` and `max_length_q` of the decoder, which models hand on to every layer. A forward
pass without them, such as generation, takes transformers' own attention.
"""

import logging
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from nemo_rl_core.backends.training.dtensor.packed_tokens import PackedTokens
from nemo_rl_core.backends.training.flash_attention import Heads, choose_version
from nemo_rl_core.backends.training.packed_attention import (
    KERNELS,
    KernelName,
    Segments,
    block_mask,
    why_not,
)
from nemo_rl_core.checkpoints.weights import caps_scores
from nemo_rl_core.config.training import DTensorTraining, kernel_wanted
from nemo_rl_core.data.pretrained import shares_rows
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.planning.model_parts import decoder_of

_LOG = logging.getLogger(__name__)
_LAYERS = {"full_attention", "sliding_attention"}


class PackedAttention:
    """Attention of a model's decoder over packed rows by a kernel, set up in place.

    Args:
        model: A transformers model that passes options on to its attention.
        kernel: The kernel's name.
    """

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
        """Whether sequences of a row may share prefixes."""
        return self.kernel != "varlen"

    def inputs(self, rows: PackedTokens) -> dict[str, Any]:
        """Options of the decoder for packed rows.

        Args:
            rows: The tokens, with boundaries. No sequence of a tree is longer than a window.
        """
        options: dict[str, Any] = {
            # A mask of four dimensions is taken as it is, so that transformers makes none.
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
    """Sets up the kernel that the settings choose for a model, in place.

    Args:
        model: A transformers model.
        training: Its `attention` and `flash_attention` are taken; `auto` is `varlen` or else `flex`
            on GPUs, and transformers' own attention on CPUs and for models that neither can
            compute.
        dtype: Type of the matrix products.
        device: Where the model computes.

    Returns:
        None for transformers' own attention, with a mask of all pairs.

    Raises:
        ConfigError: If the kernel that is asked for cannot compute the model's attention.
        ResourceError: If the version of FlashAttention that is asked for cannot.
    """
    wanted = kernel_wanted(training)
    if wanted == "sdpa" or (wanted == "auto" and device.type != "cuda"):
        return None
    reasons = partial(_reasons, model, training, dtype=getattr(torch, dtype), device=device)
    kernel = next((each for each in _FAST if wanted in ("auto", each) and not reasons(each)), None)
    if kernel is not None:
        if wanted == "auto":
            _LOG.warning("training.attention: auto is %s for %s", kernel, type(model).__name__)
        if kernel == "varlen":
            heads = _heads(model.config.get_text_config(), getattr(torch, dtype), device)
            choose_version(training.flash_attention, heads)
        return PackedAttention(model, kernel)
    if wanted != "auto":
        found = reasons(cast(KernelName, wanted))
        raise _refused(model, wanted, found, others=[n for n in _FAST if not reasons(n)])
    _LOG.warning(
        "training.attention: auto is sdpa for %s, with a mask of all pairs of tokens: %s",
        type(model).__name__,
        "; ".join(dict.fromkeys(reason for kernel in _FAST for reason in reasons(kernel))),
    )
    return None


_FAST: tuple[KernelName, KernelName] = ("varlen", "flex")


def _refused(model: Any, wanted: str, found: list[str], *, others: list[KernelName]) -> ConfigError:
    return ConfigError(
        f"training.attention: {wanted} cannot compute {type(model).__name__}",
        expected="auto, or one of " + ", ".join([*others, "sdpa"]),
        got="; ".join(found),
        fix="leave training.attention out: auto takes the fastest that computes this model here",
    )


def _reasons(
    model: Any,
    training: DTensorTraining,
    kernel: KernelName,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[str]:
    """What keeps a kernel from computing the model's attention over packed rows."""
    config = model.config.get_text_config()
    found = []
    if training.context_parallel_size > 1:
        found.append("context_parallel_size splits rows, for which attention gathers keys")
    if not shares_rows(model.config.to_dict()):
        found.append("the model reads images, so that rows are not packed")
    own = decoder_of(model).config._attn_implementation
    if own != "sdpa" and not str(own).startswith("packed_"):
        found.append(f"transformers computes this model with attention of its own, {own!r}")
    if not getattr(model, "_supports_attention_backend", False):
        found.append("the model hands no sequence boundaries on to its attention")
    if others := set(getattr(config, "layer_types", None) or ()) - _LAYERS:
        found.append(f"layers of {', '.join(sorted(others))}")
    if getattr(config, "is_heterogeneous", False):
        found.append("layers of different shapes")
    if caps_scores(config):
        found.append("attn_logit_softcapping, which the kernels lack")
    if not getattr(config, "is_causal", True):
        found.append("attention in both directions")
    return found or why_not(
        kernel,
        device=device,
        dtype=dtype,
        head_sizes=_head_sizes(config),
        windowed=_windows(config) != {None},
    )


def _heads(config: Any, dtype: torch.dtype, device: torch.device) -> Heads:
    num_heads = int(config.num_attention_heads)
    num_keys = int(getattr(config, "num_key_value_heads", None) or num_heads)
    (size,) = _head_sizes(config)
    return Heads(device, dtype, size, num_heads // num_keys, frozenset(_windows(config)))


def _head_sizes(config: Any) -> set[int]:
    declared = getattr(config, "head_dim", None)
    size = int(declared or config.hidden_size // config.num_attention_heads)
    # Latent attention declares the sizes of queries with keys, and of values.
    sizes = (getattr(config, name, None) for name in ("qk_head_dim", "v_head_dim"))
    return {int(each) for each in sizes if each} or {size}


def _windows(config: Any) -> set[int | None]:
    """Windows of the layers; None stands for full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:  # all layers have the window, unless the model does without
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
    """Transformers' interface: query `[R, H, L, E]`, key and value `[R, G, L, E]`.

    Returns:
        `[R, L, H, E]`, and no weights of attention.
    """
    boundaries = options.get("cu_seq_lens_q")
    if boundaries is None:
        return _attend_by_mask(module, query, key, value, attention_mask, options)
    _refuse_unknown(module, options)
    last = options.get("last_to_attend")
    segments = Segments(boundaries, options["max_length_q"], options.get("block_masks"), last)
    window = _window_of(module, options, segments)
    kind = query.device.type
    # Autocast reaches no operators but torch's own, and rope leaves values in another dtype.
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
    # Some models say it in the mask alone.
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
    """Transformers' own attention, of a forward pass over rows that are not packed."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if mask is not None and mask.shape[-1] == 1 < key.shape[2]:
        raise ModelError(
            f"{type(module).__name__} was not given the boundaries of packed sequences",
            expected="a model that hands the options of its decoder on to attention",
            got="attention without cu_seq_lens_q",
            fix="set training.attention to sdpa",
        )
    attended: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, mask, **options
    )
    return attended


def _refuse_unknown(module: Any, options: dict[str, Any]) -> None:
    """Raises for what changes attention and no kernel computes."""
    changes = {name: options.get(name) for name in ("softcap", "s_aux", "position_bias")}
    found = [name for name, value in changes.items() if value is not None]
    if options.get("dropout"):
        found.append("dropout")
    if found:
        raise ModelError(
            f"{type(module).__name__} asks its attention for {', '.join(found)}",
            expected="scores that are scaled and nothing else",
            got=", ".join(found),
            fix="set training.attention to sdpa",
        )
