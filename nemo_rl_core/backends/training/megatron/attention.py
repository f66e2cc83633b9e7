"""Attention of Megatron's local layers over packed rows by boundaries, without a mask of all pairs.

Layers and recomputation hand on a mask, which is a tensor: boundaries `[S + 1]` take its place. If
Transformer Engine is installed, its kernels are used instead.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from nemo_rl_core.backends.training.flash_attention import Heads, choose_version
from nemo_rl_core.backends.training.megatron.settings import has_transformer_engine
from nemo_rl_core.backends.training.packed_attention import KERNELS, Segments, why_not
from nemo_rl_core.config.training import MegatronTraining, kernel_wanted
from nemo_rl_core.errors import ConfigError

_LOG = logging.getLogger(__name__)


class AttentionByBoundaries(DotProductAttention):  # type: ignore[misc]
    """Local attention that takes a mask, or the boundaries of packed sequences in its place."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        """`[L, R, H E]` of query `[L, R, H, E]`, key and value `[L, R, G, E]`.

        Args:
            query: Queries.
            key: Keys.
            value: Values.
            attention_mask: `[R, 1, L, L]` bool, True where attention is forbidden; or `[S + 1]`
                int32, the first token of each sequence with all rows in a line.
            args: See `DotProductAttention`.
            options: See `DotProductAttention`.
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
        # No sequence is longer than its row; the exact length would be a copy to the host.
        segments = Segments(attention_mask, row_length)
        scale = self.softmax_scale
        attended = KERNELS["varlen"](query, key, value, segments, scale=scale, window=None)
        return attended.view(num_rows, row_length, -1).transpose(0, 1).contiguous()


def attend_by_boundaries(block_spec: Any) -> None:
    """Uses `AttentionByBoundaries` in every layer of a specification of local layers."""
    for layer in block_spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = AttentionByBoundaries


def attention_classes() -> set[type]:
    """The attention that keeps packed rows apart, of which models may be built."""
    from nemo_rl_core.backends.training.megatron.context import AttentionToWholeRows

    if not has_transformer_engine():
        return {AttentionByBoundaries, AttentionToWholeRows}
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return {TEDotProductAttention}


def takes_boundaries(
    model: Any, training: MegatronTraining, *, dtype: str, device: torch.device, fused: bool
) -> bool:
    """Returns whether packed rows go to the model's attention as boundaries and not as a mask.

    Args:
        model: A `GPTModel`, not wrapped.
        training: Its `attention` and `flash_attention` are taken; `auto` is `varlen` on GPUs where
            that can compute.
        dtype: Type of the matrix products.
        device: Where the model computes.
        fused: Whether its layers are Transformer Engine's.

    Raises:
        ConfigError: If `varlen` is asked for and cannot compute the model's attention.
        ResourceError: If the version of FlashAttention that is asked for cannot.
    """
    wanted = kernel_wanted(training)
    if wanted == "sdpa" or (wanted == "auto" and (fused or device.type != "cuda")):
        return False
    config, computed = model.config, getattr(torch, dtype)
    reasons = why_not(
        "varlen",
        device=device,
        dtype=computed,
        head_sizes={config.kv_channels},
        windowed=False,
    )
    if training.context_parallel_size > 1:
        reasons.append("context_parallel_size splits rows, for which attention gathers keys")
    if fused:
        reasons.append("Transformer Engine is installed, which has kernels of its own")
    if not reasons:
        _LOG.warning("training.attention: %s is varlen", wanted)
        repeats = config.num_attention_heads // config.num_query_groups
        heads = Heads(device, computed, config.kv_channels, repeats)
        choose_version(training.flash_attention, heads)
        return True
    if wanted == "varlen":
        raise ConfigError(
            "training.attention: varlen cannot compute this model",
            expected="auto or sdpa",
            got="; ".join(reasons),
            fix="leave training.attention out",
        )
    _LOG.warning(
        "training.attention: auto is sdpa, with a mask of all pairs of tokens: %s",
        "; ".join(reasons),
    )
    return False


def refuse_dense_rows(
    config: Any, shapes: Iterable[tuple[int, int]], *, memory_bytes: float
) -> None:
    """Refuses rows whose scores of all pairs of tokens no GPU of this size holds.

    Attention under a mask keeps the scores, their float32 softmax and the weights of a layer until
    its backward pass: of all layers of the rank, or with recomputation of one.

    Args:
        config: Megatron's `TransformerConfig`.
        shapes: Rows and row length of each micro-batch.
        memory_bytes: Of the GPU.

    Raises:
        ConfigError: For the first micro-batch that is too large.
    """
    num_layers = config.num_layers // config.pipeline_model_parallel_size
    width = config.params_dtype.itemsize
    heads = config.num_attention_heads / config.tensor_model_parallel_size
    a_pair = heads * (2 * width + 4) / config.context_parallel_size
    kept = 1 if config.recompute_granularity == "full" else num_layers
    for num_rows, row_length in shapes:
        needed = kept * num_rows * row_length**2 * a_pair
        if needed > memory_bytes:
            raise ConfigError(
                f"attention over rows of {row_length} tokens does not fit the GPU: Megatron's own "
                "keeps the scores of all pairs of tokens",
                expected=f"at most {memory_bytes / 2**30:.0f} GiB",
                got=f"{needed / 2**30:.0f} GiB for {num_rows} x {row_length} tokens in {kept} of "
                f"{num_layers} layers",
                fix="set model.dtype: bfloat16, in which training.attention: auto makes no scores; "
                "install Transformer Engine (docs/clusters.md); or lower max_tokens_per_microbatch",
            )
