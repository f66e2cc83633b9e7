"""Logprobs of chosen tokens, without materializing all logits."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_BYTES = 192 * 2**20
"""The budget of the logits that exist at once, in float32, with what their gradient needs.

With a vocabulary of 151,936 a step on 4,096 tokens takes 0.30 GiB more than it has, a 23rd of what
full logits take. Fewer rows at once cost more CPU time (64 rows 10 % more), and more rows none less.
"""
_TENSORS_A_CHUNK = 4
_MOST_ROWS = 1024


def rows_at_once(vocab_size: int) -> int:
    """Rows whose logits are computed at once, within `LOGITS_BYTES`.

    Args:
        vocab_size: Rows of the head, or of the largest part of it that a rank holds.

    Returns:
        At most 1,024, beyond which the products get no faster, and at least 1.

    Example:
        >>> rows_at_once(32), rows_at_once(49_152), rows_at_once(151_936)
        (1024, 256, 82)
    """
    return max(1, min(_MOST_ROWS, LOGITS_BYTES // (_TENSORS_A_CHUNK * 4 * vocab_size)))


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
    cost is one more product with the head (Chen et al. 2016, arXiv:1604.06174).

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
    chunks = zip(torch.split(hidden, chunk_size), torch.split(token_ids, chunk_size), strict=True)
    return torch.cat(
        [
            # Deterministic, so no generator state is kept.
            checkpoint(
                _chunk_logprobs,
                hidden_chunk,
                lm_head_weight,
                bias,
                ids_chunk,
                temperature,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for hidden_chunk, ids_chunk in chunks
        ]
    )


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


def _chunk_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: float
) -> Tensor:
    logits = _scaled_logits(hidden, weight, bias, temperature)
    # One [chunk, V] tensor fewer than log_softmax, which keeps its whole output for backward.
    return logits.gather(-1, token_ids) - torch.logsumexp(logits, dim=-1, keepdim=True)


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Tensor:
    return _at_least_float32(F.linear(hidden, weight, bias)) / temperature


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
