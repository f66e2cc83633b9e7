"""Attention of Megatron's local layers over packed rows, with boundaries instead of a mask.

Layers and recomputation pass a mask tensor along; boundaries `[S + 1]` are passed in the same
argument. If Transformer Engine is installed, its kernels are used instead.
"""

import logging
from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention

from nemo_rl_core.backends.experimental.flash_attention import Heads, choose_version
from nemo_rl_core.backends.training.context_parallel import full_rows
from nemo_rl_core.backends.training.megatron.settings import has_transformer_engine
from nemo_rl_core.backends.training.packed_attention import KERNELS, Segments, unsupported_reasons
from nemo_rl_core.config.training import MegatronTraining, kernel_wanted
from nemo_rl_core.errors import ConfigError

_LOG = logging.getLogger(__name__)


class AttentionByBoundaries(DotProductAttention):  # type: ignore[misc]
    """Local attention that takes a mask or the boundaries of packed sequences."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Returns the attended values `[L, R, H E]` of `[L, R, H, E]` queries.

        Args:
            attention_mask: `[R, 1, L, L]` bool, True where attention is forbidden; or `[S + 1]`
                int32, the first token of each sequence in the concatenated rows.
        """
        if attention_mask is None or attention_mask.ndim > 1:
            attended: torch.Tensor = super().forward(
                query, key, value, attention_mask, *args, **options
            )
            return attended
        row_length, num_rows = query.shape[:2]
        query, key, value = (
            part.transpose(0, 1).flatten(end_dim=1).to(value.dtype) for part in (query, key, value)
        )
        # The row length bounds all sequences; the exact length would need a copy to the host.
        segments = Segments(attention_mask, row_length)
        scale = self.softmax_scale
        attended = KERNELS["varlen"](query, key, value, segments, scale=scale, window=None)
        return attended.view(num_rows, row_length, -1).transpose(0, 1).contiguous()


class AttentionToFullRows(DotProductAttention):  # type: ignore[misc]
    """Local attention of this rank's queries to the keys and values of all context ranks.

    Queries stay on their rank; keys and values of the full row are gathered, as in the dtensor
    backend. The mask is `[R, 1, L / ranks, L]`, True where attention is forbidden.
    """

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        local_config = copy(config)
        # Any other size is rejected, although `forward` handles context parallelism.
        local_config.context_parallel_size = 1
        super().__init__(local_config, *args, **options)
        self.config = config

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Computes `[L / ranks, R, H E]` from query, key and value `[L / ranks, R, H, E]`."""
        group = parallel_state.get_context_parallel_group()
        key, value = (full_rows(part, group, dim=0) for part in (key, value))
        attended: torch.Tensor = super().forward(query, key, value, *args, **options)
        return attended


def attention_classes() -> set[type]:
    """Returns the attention classes that separate packed sequences."""
    if not has_transformer_engine():
        return {AttentionByBoundaries, AttentionToFullRows}
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return {TEDotProductAttention}


def takes_boundaries(
    model: Any, training: MegatronTraining, *, dtype: str, device: torch.device, fused: bool
) -> bool:
    """Returns whether the model's attention gets boundaries of packed rows instead of a mask.

    `auto` chooses `varlen` on GPUs if it supports the model.

    Args:
        fused: Whether the layers are Transformer Engine's, which have their own kernels.
    """
    requested = kernel_wanted(training)
    if requested == "sdpa" or (requested == "auto" and (fused or device.type != "cuda")):
        return False
    config, torch_dtype = model.config, getattr(torch, dtype)
    reasons = unsupported_reasons(
        "varlen",
        device=device,
        dtype=torch_dtype,
        head_sizes={config.kv_channels},
        windowed=False,
    )
    if training.context_parallel_size > 1:
        reasons.append("context_parallel_size splits rows, so attention has to gather keys")
    if fused:
        reasons.append("Transformer Engine is installed and uses its own kernels")
    if not reasons:
        _LOG.warning("training.attention: %s chose varlen", requested)
        repeats = config.num_attention_heads // config.num_query_groups
        heads = Heads(device, torch_dtype, config.kv_channels, repeats)
        choose_version(training.flash_attention, heads)
        return True
    if requested == "varlen":
        raise ConfigError(
            "training.attention: varlen does not support this model",
            expected="auto or sdpa",
            got="; ".join(reasons),
            fix="leave training.attention out",
        )
    _LOG.warning(
        "training.attention: auto chose sdpa, with a mask of all pairs of tokens: %s",
        "; ".join(reasons),
    )
    return False


def refuse_dense_rows(
    config: Any, shapes: Iterable[tuple[int, int]], *, memory_bytes: float
) -> None:
    """Raises if the attention scores of all pairs of tokens do not fit the GPU.

    Masked attention keeps a layer's scores, their float32 softmax and the attention weights until
    the backward pass, for all layers of the rank, or for one with recomputation.
    """
    num_layers = config.num_layers // config.pipeline_model_parallel_size
    width = config.params_dtype.itemsize
    heads = config.num_attention_heads / config.tensor_model_parallel_size
    bytes_per_pair = heads * (2 * width + 4) / config.context_parallel_size
    kept_layers = 1 if config.recompute_granularity == "full" else num_layers
    for num_rows, row_length in shapes:
        needed = kept_layers * num_rows * row_length**2 * bytes_per_pair
        if needed > memory_bytes:
            raise ConfigError(
                f"attention over rows of {row_length} tokens does not fit the GPU: Megatron's "
                "local attention keeps the scores of all pairs of tokens",
                expected=f"at most {memory_bytes / 2**30:.0f} GiB",
                got=f"{needed / 2**30:.0f} GiB for {num_rows} x {row_length} tokens in "
                f"{kept_layers} of {num_layers} layers",
                fix="set model.dtype: bfloat16, for which training.attention: auto keeps no "
                "scores; install Transformer Engine (docs/docker.md); or lower "
                "max_tokens_per_microbatch",
            )
