"""Logprobs from a language model's head, whole or split over the vocabulary."""

from typing import Any, TypedDict

import torch
from torch.distributed.tensor import DTensor

from nemo_rl_core.backends.training.vocab_parallel import (
    vocab_parallel_logprobs_from_hidden,
    vocab_parallel_topk_logprobs_from_hidden,
)
from nemo_rl_core.functional.logprobs import token_logprobs_from_hidden, topk_logprobs_from_hidden


class HeadOptions(TypedDict):
    """Options of all logprobs of a model."""

    temperature: float
    chunk_size: int


def token_logprobs(
    hidden: torch.Tensor, head: Any, token_ids: torch.Tensor, **options: Any
) -> torch.Tensor:
    """`[N, K]` logprobs of `token_ids [N, K]` after `hidden [N, D]`, see `HeadOptions`."""
    if isinstance(head.weight, DTensor):
        return vocab_parallel_logprobs_from_hidden(
            hidden, token_ids=token_ids, **_shard(head), **options
        )
    return token_logprobs_from_hidden(hidden, head.weight, token_ids, bias=head.bias, **options)


def topk_logprobs(
    hidden: torch.Tensor, head: Any, *, k: int, num_ids: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logprobs `[N, k]` of the most likely tokens below `num_ids`, see `HeadOptions`."""
    options = {**options, "k": k, "num_ids": num_ids}
    if isinstance(head.weight, DTensor):
        return vocab_parallel_topk_logprobs_from_hidden(hidden, **_shard(head), **options)
    return topk_logprobs_from_hidden(hidden, head.weight, bias=head.bias, **options)


def _shard(head: Any) -> dict[str, Any]:
    """This rank's rows of a head that is split over the ranks of one mesh."""
    mesh, size = head.weight.device_mesh, head.weight.shape[0]
    # Rows are split as by `torch.chunk`: the last rank gets the remainder.
    rows_per_rank = -(-size // mesh.size())
    return {
        "weight_shard": head.weight.to_local(),
        "bias_shard": None if head.bias is None else head.bias.to_local(),
        "group": mesh.get_group(),
        "vocab_start": min(mesh.get_local_rank() * rows_per_rank, size),
    }
