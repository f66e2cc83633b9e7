"""Logprobs of chosen tokens, without materializing all logits."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_BYTES = 192 * 2**20
"""Budget of the float32 logits that exist at once, including memory for their gradient.

It fits 82 rows at 151,936 tokens. More rows at once would save hardly any CPU time; fewer than 64
would be slower.
"""
LOGITS_BYTES_ON_GPU = 2**30
"""Budget on a GPU: 441 rows at 151,936 tokens.

A product with the head takes 2 FLOPs per row for each bfloat16 weight of 2 bytes. An H100 computes
295 FLOPs in the time of reading a byte, so with fewer than 295 rows it waits for memory.
"""
_TENSORS_PER_CHUNK = 4
_KEPT_TENSORS = 2
_MAX_ROWS = 1024


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """Returns the number of rows whose logits fit into the budget of the device.

    At least 1, and at most 1,024, beyond which the products get no faster. If ranks have shards of
    the head, `vocab_size` is that of the largest shard.

    Example:
        >>> [rows_at_once(size, torch.device("cpu")) for size in (32, 49_152, 151_936)]
        [1024, 256, 82]
    """
    return max(1, min(_MAX_ROWS, _budget(device) // (_TENSORS_PER_CHUNK * 4 * vocab_size)))


def _budget(device: torch.device) -> int:
    return LOGITS_BYTES_ON_GPU if device.type == "cuda" else LOGITS_BYTES


def logprobs_from_logits(logits: Tensor, targets: Tensor, *, temperature: float) -> Tensor:
    """Computes logprobs `[...]` of token ids from logits `[..., V]`, in float32 or float64."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
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
    cost is one more product with the head (Chen et al. 2016, arXiv:1604.06174). The head's gradient
    is accumulated over chunks in one tensor. There are no second derivatives.

    Args:
        hidden: `[N, D]` final hidden states.
        lm_head_weight: `[V, D]`, in the dtype of `hidden`.
        token_ids: `[N, K]` int64 next tokens of each row.
        temperature: Divisor of the logits, as in sampling.
        chunk_size: Rows computed at once, at least 1.
        bias: `[V]` bias of the head, if it has one.

    Returns:
        `[N, K]` logprobs in nats, in float32 (float64 for float64 inputs).
    """
    options = _Options(temperature, chunk_size, keeps=False)
    logprobs: Tensor = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, lm_head_weight, bias, token_ids, options
    )
    return logprobs


def token_logprobs_within_budget(
    hidden: Tensor,
    lm_head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Same as `token_logprobs_from_hidden`, with a chunk size that fits the device's budget.

    If the logits of all rows and their gradient fit into it, they are kept for the backward pass,
    which then saves one product with the head.
    """
    num_rows, vocab_size = len(hidden), lm_head_weight.shape[0]
    keeps = _KEPT_TENSORS * 4 * num_rows * vocab_size <= _budget(hidden.device)
    rows = max(1, num_rows) if keeps else rows_at_once(vocab_size, hidden.device)
    options = _Options(temperature, rows, keeps)
    logprobs: Tensor = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, lm_head_weight, bias, token_ids, options
    )
    return logprobs


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
    """Returns the k most likely tokens of each row and their logprobs, without gradients.

    Args:
        hidden: `[N, D]` final hidden states.
        lm_head_weight: `[V, D]`, in the dtype of `hidden`.
        k: Number of tokens, at most `num_ids`.
        num_ids: Only ids below it are chosen. Heads often have more rows than the tokenizer has
            tokens; such rows keep their probability, as in sampling, but another model of the same
            vocabulary may not have them.
        temperature: Divisor of the logits, as in sampling.
        chunk_size: Rows computed at once, at least 1.
        bias: `[V]` bias of the head, if it has one.

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
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits.div_(temperature)


class _Options(NamedTuple):
    """`num_rows` logits are computed at once; `keeps` keeps them for the backward pass."""

    temperature: float
    num_rows: int
    keeps: bool


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps the `[N]` log-sums of the forward pass, and the logits if `_Options.keeps`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        options: _Options,
    ) -> Tensor:
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        cast = weight.to(dtype), None if bias is None else bias.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        logprobs = hidden.new_empty(token_ids.shape, dtype=wide)
        log_sums = hidden.new_empty((len(hidden), 1), dtype=wide)
        ctx.kept = None
        for start in range(0, len(hidden), options.num_rows):
            rows = slice(start, start + options.num_rows)
            logits = _scaled_logits(hidden[rows].to(dtype), *cast, options.temperature)
            chosen, largest = logits.gather(-1, token_ids[rows]), logits.amax(-1, keepdim=True)
            # In place: fewer passes over `[N, V]` than `logsumexp`, and no second tensor.
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
        cast = weight.to(dtype), None if bias is None else bias.to(dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        hidden_gradient = torch.empty_like(hidden)
        # Sums over many chunks: FSDP gathers weights in bfloat16, which would lose small terms.
        weight_gradient = zeros_for_sums(weight) if needs_weight else None
        bias_gradient = zeros_for_sums(bias) if needs_bias else None
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
            hidden_gradient[rows] = gradient @ cast[0]
            if weight_gradient is not None and weight_gradient.dtype == dtype:
                weight_gradient.addmm_(gradient.T, chunk)
            elif weight_gradient is not None:
                weight_gradient.add_(gradient.T @ chunk)
            if bias_gradient is not None:
                bias_gradient.add_(gradient.sum(0))
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        if bias_gradient is not None:
            bias_gradient = bias_gradient.to(bias.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None


def zeros_for_sums(tensor: Tensor) -> Tensor:
    """Returns zeros of a tensor's shape, in float32 or wider."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
