"""Causal attention within packed sequences, without a mask of all pairs.

A kernel takes the tokens of all rows in one dimension, query `[N, H, E]`, key and value
`[N, G, E]`, where G divides H, and the sequence boundaries (`Segments`); it returns `[N, H, E]`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

KernelName = Literal["varlen", "flex", "reference"]
_BLOCK = 128
"""Block size of FlexAttention in tokens, for queries and keys."""


@dataclass(frozen=True)
class Segments:
    """Boundaries of packed sequences, with the tokens of all rows in one dimension.

    The filler at a row's end counts as a separate sequence.

    Attributes:
        boundaries: `[S + 1]` int32, the first token of each sequence, then the number of tokens.
            Sequences that share a prefix count as one.
        longest: Upper bound on the tokens of the longest sequence.
        masks: FlexAttention's masks by window (None for full attention), for the kernel `flex`.
        last: `[N]` int32, the last token that attends to each one, if sequences share prefixes;
            None if that is the last token of the sequence. Windows do not apply with it, and the
            kernel `varlen` does not support it.
    """

    boundaries: Tensor
    longest: int
    masks: "dict[int | None, BlockMask] | None" = None
    last: Tensor | None = None


def segments_of(position_ids: Tensor) -> Segments:
    """Returns the boundaries of sequences, whose positions `[R, L]` restart at 0."""
    starts = (position_ids.flatten() == 0).cpu().nonzero()[:, 0]
    boundaries = torch.cat([starts, torch.tensor([position_ids.numel()])]).int()
    longest = int(boundaries.diff().max())
    return Segments(boundaries.to(position_ids.device, non_blocking=True), longest)


class Kernel(Protocol):
    """Attention of packed tokens; see the module's docstring."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        *,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """Returns the attended values, `[N, H, E]`.

        Args:
            scale: Factor of the scores; None for one over the square root of E.
            window: Number of tokens that a token attends to, itself included; None for no limit.
        """


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Computes one sequence at a time, in any dtype on any device; the reference for tests."""
    borders = segments.boundaries.tolist()
    outputs = []
    for first, end in pairwise(borders):
        positions = torch.arange(end - first, device=query.device)
        distance = positions[:, None] - positions
        mask = distance >= 0
        if segments.last is not None:
            mask &= positions[:, None] + first <= segments.last[first:end]
        elif window is not None:
            mask &= distance < window
        attended = F.scaled_dot_product_attention(
            query[first:end].transpose(0, 1),
            key[first:end].transpose(0, 1),
            value[first:end].transpose(0, 1),
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs)


def varlen_options() -> frozenset[str]:
    """Returns the parameters of torch's `varlen_attn`; empty if torch has no such function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Computes torch's FlashAttention over sequences of any length; on GPUs, in 16 bits."""
    from torch.nn.attention.varlen import varlen_attn

    options = _varlen_arguments(_cached_varlen_options(), scale=scale, window=window)
    if (repeats := query.shape[1] // key.shape[1]) > 1:
        if "enable_gqa" in _cached_varlen_options():
            options["enable_gqa"] = True
        else:
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    borders, longest = segments.boundaries, segments.longest
    attended = varlen_attn(query, key, value, borders, borders, longest, longest, **options)
    assert isinstance(attended, Tensor)  # not a tuple with log-sums
    return attended


_cached_varlen_options = cache(varlen_options)


def _varlen_arguments(
    supported: frozenset[str], *, scale: float | None, window: int | None
) -> dict[str, Any]:
    """Returns the arguments for causal attention.

    Torch up to 2.10 has `is_causal`, later versions `window_size`, where (-1, 0) is causal.
    """
    options: dict[str, Any] = {}
    if "scale" in supported:
        options["scale"] = scale
    elif scale is not None:
        raise NotImplementedError("this torch's varlen_attn has no scale")
    if "window_size" in supported:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is not None:
        raise NotImplementedError("this torch's varlen_attn has no window_size")
    if "is_causal" in supported:
        options["is_causal"] = window is None
    return options


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Computes FlexAttention over blocks of tokens; compiled on GPUs, no gradients on CPUs."""
    assert segments.masks is not None
    one_row = (each.transpose(0, 1)[None] for each in (query, key, value))
    attended: Tensor = _flex(query.is_cuda)(
        *one_row,
        block_mask=segments.masks[window],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        # Otherwise fewer than 128 tokens use the decoding kernel.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return attended[0].transpose(0, 1)


@cache
def _flex(compiled: bool) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention as plain

    if not compiled:
        return plain
    # Uncompiled FlexAttention materializes the scores of all pairs. Without `fullgraph`, torch
    # would silently fall back to it at the limit of recompilations, which a process with a few
    # models reaches.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(plain, fullgraph=True)


def block_mask(last: Tensor, window: int | None) -> "BlockMask":
    """Returns FlexAttention's block mask of packed tokens, without a mask of all pairs.

    Args:
        last: `[N]` int32, the last token that attends to each one: the last token of its sequence
            or, if sequences share prefixes, of all sequences with this prefix.
        window: Number of tokens that a token attends to, itself included; None for no limit.
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_tokens = len(last)
    tokens = torch.arange(num_tokens, device=last.device, dtype=torch.int32)
    start = tokens[::_BLOCK]
    end = (start + _BLOCK - 1).clamp(max=num_tokens - 1)
    padded = F.pad(last, (0, -num_tokens % _BLOCK), value=-1).view(-1, _BLOCK)
    furthest = padded.amax(1)
    nearest = padded.where(padded >= 0, num_tokens).amin(1)
    some_pairs = (start <= start[:, None]) & (furthest >= start[:, None])
    all_pairs = (start < start[:, None]) & (nearest >= end[:, None])
    if window is not None:
        some_pairs &= start[:, None] - end < window
        all_pairs &= end[:, None] - start < window

    def attends(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (key <= query) & (query <= last[key])
        return allowed if window is None else allowed & (query - key < window)

    partial_blocks = _counts_and_indices(some_pairs & ~all_pairs)
    full_blocks = _counts_and_indices(all_pairs)
    return BlockMask.from_kv_blocks(
        *partial_blocks,
        *full_blocks,
        BLOCK_SIZE=_BLOCK,
        mask_mod=attends,
        seq_lengths=(num_tokens, num_tokens),
    )


def _counts_and_indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of set blocks per row `[1, 1, B]` and their indices `[1, 1, B, B]`."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


KERNELS: dict[KernelName, Kernel] = {
    "varlen": varlen_attention,
    "flex": flex_attention,
    "reference": reference_attention,
}


def unsupported_reasons(
    kernel: KernelName,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_sizes: set[int],
    windowed: bool,
) -> list[str]:
    """Returns the reasons why a kernel cannot compute attention; empty if it can."""
    if kernel == "reference":
        return []
    reasons = [] if device.type == "cuda" else [f"{kernel} only computes gradients on GPUs"]
    if kernel == "flex":
        small = min(head_sizes)
        return reasons + ([f"flex supports heads of 16 or more, not {small}"] if small < 16 else [])
    supported = varlen_options()
    if not supported:
        reasons.append(f"torch {torch.__version__} has no torch.nn.attention.varlen")
    elif windowed and "window_size" not in supported:
        reasons.append(f"varlen_attn of torch {torch.__version__} has no windows")
    if dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"varlen computes in 16 bits, not in {str(dtype).removeprefix('torch.')}")
    if len(head_sizes) > 1 or any(size % 8 or size > 256 for size in head_sizes):
        reasons.append(
            "varlen supports heads of one size, a multiple of 8 up to 256, not "
            + " and ".join(map(str, sorted(head_sizes)))
        )
    return reasons
