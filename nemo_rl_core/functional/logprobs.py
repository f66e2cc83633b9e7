"""Logprobs of chosen tokens, without ever holding the logits of all of them."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def logprobs_from_logits(logits: Tensor, targets: Tensor, *, temperature: float) -> Tensor:
    """The plain computation, for tests and for logits that exist anyway.

    Args:
        logits: `[..., V]`.
        targets: `[...]` int64 token ids.
        temperature: What the logits are divided by, as in sampling.

    Returns:
        `[...]` logprobs in nats, in float32 (float64 for float64 logits).
    """
    scaled = _at_least_float32(logits) / temperature
    return torch.log_softmax(scaled, dim=-1).gather(-1, targets[..., None]).squeeze(-1)


def next_token_logprobs_from_hidden(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Logprobs of `targets`, from hidden states, a chunk of rows at a time.

    The logits of a chunk are dropped after the forward pass and made again in the backward pass,
    so that at most about four `[chunk_size, V]` tensors exist at once and `[N, V]` never does.
    The price is one more product with the head (Chen et al. 2016, arXiv:1604.06174).

    Args:
        hidden: `[N, D]` final hidden states; row i predicts `targets[i]`.
        lm_head_weight: `[V, D]`, in the dtype of `hidden`.
        targets: `[N]` int64 token ids.
        temperature: What the logits are divided by, as in sampling.
        chunk_size: Rows computed at once, at least 1.
        bias: `[V]` bias of the head, where it has one.

    Returns:
        `[N]` logprobs in nats, in float32 (float64 for float64 inputs).
    """
    chunks = zip(torch.split(hidden, chunk_size), torch.split(targets, chunk_size), strict=True)
    return torch.cat(
        [
            # Nothing random happens inside, so there is no generator state worth keeping.
            checkpoint(
                _chunk_logprobs,
                hidden_chunk,
                lm_head_weight,
                bias,
                target_chunk,
                temperature,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for hidden_chunk, target_chunk in chunks
        ]
    )


def _chunk_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> Tensor:
    logits = _at_least_float32(F.linear(hidden, weight, bias)) / temperature
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    # One [chunk, V] tensor fewer than log_softmax, which keeps its whole output for backward.
    return chosen - torch.logsumexp(logits, dim=-1)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
