"""Logprobs of a head that is split over the vocabulary.

No rank has logits of the full vocabulary, even for a chunk of rows: maxima, sums and the chosen
logits are reduced over the group (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_core.backends.training.context_parallel import gathered_parts
from nemo_rl_core.functional.logprobs import zeros_for_sums


def vocab_parallel_logprobs_from_hidden(
    hidden: Tensor,
    weight_shard: Tensor,
    token_ids: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    temperature: float,
    chunk_size: int,
    bias_shard: Tensor | None = None,
) -> Tensor:
    """Returns `[N, K]` logprobs of tokens, as `token_logprobs_from_hidden` with the full head.

    A collective of the group, forward and backward. All ranks pass the same rows and ids, and the
    gradient of the result must be the same on all of them. Each gets the full gradient of `hidden`,
    and the gradient of its shard.

    Args:
        hidden: `[N, D]` final hidden states, the same on every rank.
        weight_shard: `[V_local, D]`, this rank's rows of the head, in the dtype of `hidden`.
        token_ids: `[N, K]` int64, in the full vocabulary.
        chunk_size: Rows computed at once, at least 1; about three `[chunk_size, V_local]` tensors
            exist at a time.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight_shard = hidden.to(dtype), weight_shard.to(dtype)
        bias_shard = None if bias_shard is None else bias_shard.to(dtype)
    logprobs: Tensor = _VocabParallelLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight_shard, bias_shard, token_ids, (group, vocab_start, temperature, chunk_size)
    )
    return logprobs


@torch.no_grad()
def vocab_parallel_topk_logprobs_from_hidden(  # noqa: PLR0913
    hidden: Tensor,
    weight_shard: Tensor,
    *,
    k: int,
    num_ids: int,
    group: dist.ProcessGroup,
    vocab_start: int,
    temperature: float,
    chunk_size: int,
    bias_shard: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns ids `[N, k]` below `num_ids` and logprobs of the k most likely tokens, best first.

    Equal to `topk_logprobs_from_hidden` with the full head, on every rank.

    Each rank contributes its k most likely tokens; the k best of these are the result.
    """
    ids, logprobs = [], []
    for chunk in torch.split(hidden, chunk_size):
        logits = _logits(chunk, weight_shard, bias_shard, temperature)
        num_candidates = max(0, min(num_ids - vocab_start, logits.shape[1]))
        # Every rank contributes k, padded with logits of minus infinity.
        best = logits.new_full((chunk.shape[0], k), float("-inf"))
        best_ids = torch.zeros_like(best, dtype=torch.long)
        local = torch.topk(logits[:, :num_candidates], min(k, num_candidates), dim=-1)
        best[:, : local.values.shape[1]] = local.values
        best_ids[:, : local.values.shape[1]] = local.indices + vocab_start
        top = torch.topk(gathered_parts(best, group, dim=-1), k, dim=-1)
        ids.append(gathered_parts(best_ids, group, dim=-1).gather(-1, top.indices))
        logprobs.append(top.values - _logsumexp(logits, group)[:, None])
    return torch.cat(ids), torch.cat(logprobs)


class _VocabParallelLogprobs(torch.autograd.Function):
    """Stores `[N]` log-sums of the forward pass and recomputes the logits of each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        options: tuple[dist.ProcessGroup, int, float, int],
    ) -> Tensor:
        group, vocab_start, temperature, chunk_size = options
        logprobs, log_sums = [], []
        for chunk, ids in zip(
            torch.split(hidden, chunk_size), torch.split(token_ids, chunk_size), strict=True
        ):
            logits = _logits(chunk, weight, bias, temperature)
            log_sum = _logsumexp(logits, group)
            local_ids, is_local = _local(ids, vocab_start, logits.shape[1])
            chosen = logits.gather(-1, local_ids).masked_fill(~is_local, 0.0)
            dist.all_reduce(chosen, group=group)
            logprobs.append(chosen - log_sum[:, None])
            log_sums.append(log_sum)
        ctx.save_for_backward(hidden, weight, bias, token_ids, torch.cat(log_sums))
        ctx.options = options
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, weight, bias, token_ids, log_sums = ctx.saved_tensors
        group, vocab_start, temperature, chunk_size = ctx.options
        hidden_gradient, weight_gradient = torch.zeros_like(hidden), zeros_for_sums(weight)
        bias_gradient = None if bias is None else zeros_for_sums(bias)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            upstream = gradients[0][rows]
            logits = _logits(hidden[rows], weight, bias, temperature)
            local_ids, is_local = _local(token_ids[rows], vocab_start, logits.shape[1])
            # d logprob(k) / d logit(v) = [v = k] - p(v), for every chosen k of the row.
            gradient = logits.sub_(log_sums[rows, None]).exp_().mul_(-upstream.sum(-1, True))
            gradient.scatter_add_(-1, local_ids, upstream.masked_fill(~is_local, 0.0))
            gradient = gradient.div_(temperature).to(weight.dtype)
            hidden_gradient[rows] = gradient @ weight
            if weight_gradient.dtype == gradient.dtype:
                weight_gradient.addmm_(gradient.T, hidden[rows])
            else:
                weight_gradient.add_(gradient.T @ hidden[rows])
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
        dist.all_reduce(hidden_gradient, group=group)
        weight_gradient = weight_gradient.to(weight.dtype)
        if bias_gradient is not None:
            bias_gradient = bias_gradient.to(bias.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Returns `[chunk, V_local]` logits, a new tensor that may be modified."""
    logits = F.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def _logsumexp(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns `[chunk]` log-sums over the full vocabulary."""
    largest = logits.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total = (logits - largest[:, None]).exp_().sum(-1)
    dist.all_reduce(total, group=group)
    return total.log() + largest


def _local(token_ids: Tensor, vocab_start: int, num_local: int) -> tuple[Tensor, Tensor]:
    """Returns indices in this rank's shard and a mask of valid ones; invalid indices are 0."""
    is_local = (token_ids >= vocab_start) & (token_ids < vocab_start + num_local)
    return (token_ids - vocab_start).masked_fill(~is_local, 0), is_local
