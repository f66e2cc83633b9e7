"""Causal attention of each token to its own packed sequence, without a mask of all pairs.

A kernel takes tokens of all rows in one dimension, query `[N, H, E]`, key and value `[N, G, E]`
with G that divides H, and where their sequences begin (`Segments`); it returns `[N, H, E]`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

KernelName = Literal["varlen", "flex", "reference"]
_BLOCK = 128
"""Tokens of a block of FlexAttention, in both directions."""


@dataclass(frozen=True)
class Segments:
    """Where the sequences of packed rows begin, with their tokens in one dimension.

    The filler at a row's end is a sequence of its own.

    Attributes:
        boundaries: `[S + 1]` int32, the first token of each sequence, and the number of tokens.
            Sequences that share a prefix count as one.
        longest: At least the tokens of the longest sequence.
        masks: FlexAttention's masks by window (None without one), for the kernel `flex` alone.
        last: `[N]` int32, the last token that attends to each one, where sequences share prefixes;
            None where it is the last of the token's sequence. No window applies beside it. The
            kernel `varlen` lacks it.
    """

    boundaries: Tensor
    longest: int
    masks: "dict[int | None, BlockMask] | None" = None
    last: Tensor | None = None


def segments_of(position_ids: Tensor) -> Segments:
    """The sequences of packed rows; copies to the host once, whatever the number of layers.

    Args:
        position_ids: `[R, L]`; restart at 0 with each sequence, and with each row.
    """
    starts = (position_ids.flatten() == 0).cpu().nonzero()[:, 0]
    boundaries = torch.cat([starts, torch.tensor([position_ids.numel()])]).int()
    longest = int(boundaries.diff().max())
    return Segments(boundaries.to(position_ids.device, non_blocking=True), longest)


class Kernel(Protocol):
    """Attention of packed tokens; see the module."""

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
        """`[N, H, E]` of query `[N, H, E]`, key and value `[N, G, E]`.

        Args:
            query: Queries.
            key: Keys.
            value: Values.
            segments: The sequences.
            scale: Factor of the scores; None for one over the square root of E.
            window: A token attends to itself and the `window - 1` before it; None for no limit.
        """
        ...


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Sequence by sequence, in any dtype on any device: what the tests hold the kernels to."""
    borders = segments.boundaries.tolist()
    found = []
    for first, end in pairwise(borders):
        places = torch.arange(end - first, device=query.device)
        distance = places[:, None] - places
        mask = distance >= 0
        if segments.last is not None:
            mask &= places[:, None] + first <= segments.last[first:end]
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
        found.append(attended.transpose(0, 1))
    return torch.cat(found)


def varlen_options() -> frozenset[str]:
    """Options of the installed torch's `varlen_attn`; none where it has no such function."""
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
    """Torch's FlashAttention over sequences of any length; on GPUs, in 16 bits."""
    from torch.nn.attention.varlen import varlen_attn

    options = _varlen_arguments(_known_varlen_options(), scale=scale, window=window)
    if (repeats := query.shape[1] // key.shape[1]) > 1:
        if "enable_gqa" in _known_varlen_options():
            options["enable_gqa"] = True
        else:
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    borders, longest = segments.boundaries, segments.longest
    attended = varlen_attn(query, key, value, borders, borders, longest, longest, **options)
    assert isinstance(attended, Tensor)  # and no sums, which were not asked for
    return attended


_known_varlen_options = cache(varlen_options)


def _varlen_arguments(
    known: frozenset[str], *, scale: float | None, window: int | None
) -> dict[str, Any]:
    """Torch says `is_causal` up to 2.10, later `window_size`, of which (-1, 0) is causal."""
    options: dict[str, Any] = {}
    if "scale" in known:
        options["scale"] = scale
    elif scale is not None:
        raise NotImplementedError("this torch's varlen_attn has no scale")
    if "window_size" in known:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is not None:
        raise NotImplementedError("this torch's varlen_attn has no window_size")
    if "is_causal" in known:
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
    """FlexAttention over blocks of tokens, compiled on GPUs; without gradients on CPUs."""
    assert segments.masks is not None
    one_row = (each.transpose(0, 1)[None] for each in (query, key, value))
    attended: Tensor = _flex(query.is_cuda)(
        *one_row,
        block_mask=segments.masks[window],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        # Else fewer than 128 tokens take the kernel of decoding.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return attended[0].transpose(0, 1)


@cache
def _flex(compiled: bool) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention as plain

    if not compiled:
        return plain
    # What is not compiled has scores of all pairs. Past the limit, which a few models with and
    # without gradients reach, torch would take that without a word, but for `fullgraph`.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(plain, fullgraph=True)


def block_mask(last: Tensor, window: int | None) -> "BlockMask":
    """FlexAttention's mask of packed tokens: never of all pairs.

    Args:
        last: `[N]` int32, the last token that attends to each one: the last of its sequence or,
            where sequences share prefixes, of those that begin with it.
        window: A token attends to itself and the `window - 1` before it; None for no limit.
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_tokens = len(last)
    tokens = torch.arange(num_tokens, device=last.device, dtype=torch.int32)
    start = tokens[::_BLOCK]
    end = (start + _BLOCK - 1).clamp(max=num_tokens - 1)
    padded = F.pad(last, (0, -num_tokens % _BLOCK), value=-1).view(-1, _BLOCK)
    furthest = padded.amax(1)
    nearest = padded.where(padded >= 0, num_tokens).amin(1)
    some = (start <= start[:, None]) & (furthest >= start[:, None])
    all_pairs = (start < start[:, None]) & (nearest >= end[:, None])
    if window is not None:
        some &= start[:, None] - end < window
        all_pairs &= end[:, None] - start < window

    def attends(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (key <= query) & (query <= last[key])
        return allowed if window is None else allowed & (query - key < window)

    partly, wholly = _listed(some & ~all_pairs), _listed(all_pairs)
    return BlockMask.from_kv_blocks(
        *partly,
        *wholly,
        BLOCK_SIZE=_BLOCK,
        mask_mod=attends,
        seq_lengths=(num_tokens, num_tokens),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number `[1, 1, B]` and indices `[1, 1, B, B]`, first, of the blocks that each row sets."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


KERNELS: dict[KernelName, Kernel] = {
    "varlen": varlen_attention,
    "flex": flex_attention,
    "reference": reference_attention,
}


def why_not(
    kernel: KernelName,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_sizes: set[int],
    windowed: bool,
) -> list[str]:
    """What keeps a kernel from computing attention; empty if nothing does.

    Args:
        kernel: Its name.
        device: Where it would compute.
        dtype: Of queries, keys and values.
        head_sizes: E of queries and keys, and of values.
        windowed: Whether some layers attend within a window.
    """
    if kernel == "reference":
        return []
    found = [] if device.type == "cuda" else [f"{kernel} computes gradients on GPUs alone"]
    check = partial(_why_not_varlen, dtype) if kernel == "varlen" else _why_not_flex
    return found + check(head_sizes, windowed)


def _why_not_varlen(dtype: torch.dtype, head_sizes: set[int], windowed: bool) -> list[str]:
    known = varlen_options()
    found = []
    if not known:
        found.append(f"torch {torch.__version__} has no torch.nn.attention.varlen")
    elif windowed and "window_size" not in known:
        found.append(f"varlen_attn of torch {torch.__version__} has no windows")
    if dtype not in (torch.bfloat16, torch.float16):
        found.append(f"varlen computes in 16 bits, not in {str(dtype).removeprefix('torch.')}")
    if len(head_sizes) > 1 or any(size % 8 or size > 256 for size in head_sizes):
        found.append(
            "varlen takes heads of one size, a multiple of 8 up to 256, not "
            + " and ".join(map(str, sorted(head_sizes)))
        )
    return found


def _why_not_flex(head_sizes: set[int], _: bool) -> list[str]:
    small = min(head_sizes)
    return [f"flex takes heads of 16 or more, not {small}"] if small < 16 else []
