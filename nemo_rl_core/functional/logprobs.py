"""Logprobs of chosen tokens, without materializing all logits."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_BYTES = 192 * 2**20
"""The budget of the logits that exist at once, in float32, with what their gradient needs.

At 151,936 tokens it has room for 82 rows. More rows at once save no CPU time worth their memory,
fewer than 64 cost some.
"""
LOGITS_BYTES_ON_GPU = 2**30
"""The same on a GPU: 441 rows at 151,936 tokens.

A product with the head computes 2 floating-point operations a row for 2 bytes of a bfloat16 weight.
An H100 does 295 in the time of a byte, so that fewer rows than that wait for memory.
"""
_TENSORS_A_CHUNK = 4
_KEPT_TENSORS = 2
_MOST_ROWS = 1024


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """Rows whose logits are computed at once, within the budget of the device.

    Args:
        vocab_size: Rows of the head, or of the largest part of it that a rank holds.
        device: Of the head.

    Returns:
        At most 1,024, beyond which the products get no faster, and at least 1.

    Example:
        >>> [rows_at_once(size, torch.device("cpu")) for size in (32, 49_152, 151_936)]
        [1024, 256, 82]
    """
    return max(1, min(_MOST_ROWS, _budget(device) // (_TENSORS_A_CHUNK * 4 * vocab_size)))


def _budget(device: torch.device) -> int:
    return LOGITS_BYTES_ON_GPU if device.type == "cuda" else LOGITS_BYTES


def logprobs_from_logits(logits: Tensor, targets: Tensor, *, temperature: float) -> Tensor:
    """Computes logprobs from existing logits.

    Args:
        logits: `[..., V]`.
        targets: `[...]` int64 token ids.
        temperature: Divisor of the logits, as in sampling.

    Returns:
        `[...]` logprobs in nats, in float32 (float64 for float64 logits).
    """
    scaled = _at_least_float32(logits) / temperature
    return torch.log_softmax(scaled, dim=-1).gather(-1, targets[..., None]).squeeze(-1)


def token_logprobs_from_hidden(
    hidden: Tensor,
    lm_head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Logprobs of chosen tokens per row from hidden states, one chunk of rows at a time.

    The logits of a chunk are dropped after the forward pass and recomputed in the backward pass, so
    that at most about four `[chunk_size, V]` tensors exist at once and `[N, V]` never does. The
    cost is one more product with the head (Chen et al. 2016, arXiv:1604.06174). One tensor takes
    the gradient of the head from all chunks. There are no second derivatives.

    Args:
        hidden: `[N, D]` final hidden states.
        lm_head_weight: `[V, D]`, in the dtype of `hidden`.
        token_ids: `[N, K]` int64 next tokens of each row.
        temperature: Divisor of the logits, as in sampling.
        chunk_size: Rows computed at once, at least 1.
        bias: `[V]` bias of the head, where it has one.

    Returns:
        `[N, K]` logprobs in nats, in float32 (float64 for float64 inputs).
    """
    return _logprobs(
        hidden, lm_head_weight, bias, token_ids, _Options(temperature, chunk_size, keeps=False)
    )


def token_logprobs_within_budget(
    hidden: Tensor,
    lm_head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
) -> Tensor:
    """As `token_logprobs_from_hidden`, within the budget of the device.

    Where the logits of all rows fit into it with their gradient, they are kept for the backward
    pass, which then needs one product with the head less.
    """
    num_rows, vocab_size = len(hidden), lm_head_weight.shape[0]
    keeps = _KEPT_TENSORS * 4 * num_rows * vocab_size <= _budget(hidden.device)
    rows = max(1, num_rows) if keeps else rows_at_once(vocab_size, hidden.device)
    return _logprobs(hidden, lm_head_weight, bias, token_ids, _Options(temperature, rows, keeps))


@torch.no_grad()
def topk_logprobs_from_hidden(
    hidden: Tensor,
    lm_head_weight: Tensor,
    *,
    k: int,
    num_ids: int,
    temperature: float,
    chunk_size: int,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row and their logprobs, without gradients, in chunks.

    Args:
        hidden: `[N, D]` final hidden states.
        lm_head_weight: `[V, D]`, in the dtype of `hidden`.
        k: Number of tokens, at most `num_ids`.
        num_ids: Only ids below it are chosen. Heads often have more rows than the tokenizer has
            tokens; such rows keep their probability, as in sampling, but another model of the same
            vocabulary may not have them.
        temperature: Divisor of the logits, as in sampling.
        chunk_size: Rows computed at once, at least 1.
        bias: `[V]` bias of the head, where it has one.

    Returns:
        `[N, k]` int64 ids, most likely first, and `[N, k]` logprobs in nats, normalized over all
        `V` rows, in float32 (float64 for float64 inputs).
    """
    ids, logprobs = [], []
    for chunk in torch.split(hidden, chunk_size):
        logits = _scaled_logits(chunk, lm_head_weight, bias, temperature)
        top = torch.topk(logits[:, :num_ids], k, dim=-1)
        ids.append(top.indices)
        logprobs.append(top.values - torch.logsumexp(logits, dim=-1, keepdim=True))
    return torch.cat(ids), torch.cat(logprobs)


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Tensor:
    logits = _at_least_float32(F.linear(hidden, weight, bias))
    return logits if temperature == 1 else logits.div_(temperature)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


class _Options(NamedTuple):
    """How logprobs are computed.

    Attributes:
        temperature: Divisor of the logits.
        num_rows: Rows whose logits are computed at once.
        keeps: Whether the backward pass finds them computed.
    """

    temperature: float
    num_rows: int
    keeps: bool


def _logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, options: _Options
) -> Tensor:
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    logprobs: Tensor = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, token_ids, options, dtype
    )
    return logprobs


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps `[N]` log-sums of the forward pass, and the logits where `_Options.keeps` says so."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        options: _Options,
        dtype: torch.dtype,
    ) -> Tensor:
        cast = _as_dtype(weight, bias, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        logprobs = hidden.new_empty(token_ids.shape, dtype=wide)
        log_sums = hidden.new_empty((len(hidden), 1), dtype=wide)
        ctx.kept = None
        for start in range(0, len(hidden), options.num_rows):
            rows = slice(start, start + options.num_rows)
            logits = _scaled_logits(hidden[rows].to(dtype), *cast, options.temperature)
            chosen, largest = logits.gather(-1, token_ids[rows]), logits.amax(-1, keepdim=True)
            # In place: fewer passes over `[N, V]` than `logsumexp` makes, and no second tensor.
            weights = logits.sub_(largest).exp_()
            log_sums[rows] = weights.sum(-1, keepdim=True).log_().add_(largest)
            logprobs[rows] = chosen - log_sums[rows]
            if options.keeps:
                ctx.kept, ctx.largest = weights, largest
            del logits, weights  # before the next ones exist
        ctx.save_for_backward(hidden, weight, bias, token_ids, log_sums)
        ctx.options, ctx.dtype = options, dtype
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, weight, bias, token_ids, log_sums = ctx.saved_tensors
        (temperature, num_rows, _), dtype = ctx.options, ctx.dtype
        cast = _as_dtype(weight, bias, dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        of_hidden = torch.empty_like(hidden)
        # The sums of many chunks: FSDP gathers weights in bfloat16, which would lose what is small.
        of_weight = zeros_for_sums(weight) if needs_weight else None
        of_bias = zeros_for_sums(bias) if needs_bias else None
        for start in range(0, len(hidden), num_rows):
            rows = slice(start, start + num_rows)
            upstream, chunk = gradients[0][rows], hidden[rows].to(dtype)
            # d logprob(k) / d logit(v) = [v = k] - p(v), for every chosen k of the row.
            total = -upstream.sum(-1, keepdim=True)
            if ctx.kept is None:
                logits = _scaled_logits(chunk, *cast, temperature)
                gradient = logits.sub_(log_sums[rows]).exp_().mul_(total)
            else:
                scale = total * (ctx.largest - log_sums).exp_()
                gradient, ctx.kept = ctx.kept.mul_(scale), None
            gradient.scatter_add_(-1, token_ids[rows], upstream)
            if temperature != 1:
                gradient.div_(temperature)
            gradient = gradient.to(dtype)
            of_hidden[rows] = gradient @ cast[0]
            if of_weight is not None and of_weight.dtype == dtype:
                of_weight.addmm_(gradient.T, chunk)
            elif of_weight is not None:
                of_weight.add_(gradient.T @ chunk)
            if of_bias is not None:
                of_bias.add_(gradient.sum(0))
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        if of_bias is not None:
            of_bias = of_bias.to(bias.dtype)
        return of_hidden, of_weight, of_bias, None, None, None


def zeros_for_sums(of: Tensor) -> Tensor:
    """Zeros of a tensor's shape, in float32 at least."""
    return torch.zeros_like(of, dtype=torch.promote_types(of.dtype, torch.float32))


def _as_dtype(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)
