"""A head that is split over ranks has the logprobs, top tokens and gradients of the full head."""

from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_core.backends.training.vocab_parallel import (
    vocab_parallel_logprobs_from_hidden,
    vocab_parallel_topk_logprobs_from_hidden,
)
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import join_process_group, rank
from nemo_rl_core.functional.logprobs import token_logprobs_from_hidden, topk_logprobs_from_hidden

N, D, V, K = 7, 6, 11, 3
STARTS = {0: (0, 6), 1: (6, 11)}


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    token_ids = torch.randint(0, V, (N, K), generator=generator)
    token_ids[0] = 5  # the same token several times, at a shard's border
    return draw(N, D), 3 * draw(V, D), draw(V), token_ids, draw(N, K)


def on_rank(chunk_size: int) -> dict[str, Any]:
    join_process_group()
    group = dist.group.WORLD
    assert group is not None
    hidden, weight, bias, token_ids, upstream = inputs()
    first, last = STARTS[rank()]
    hidden.requires_grad_()
    weight = weight[first:last].clone().requires_grad_()
    bias = bias[first:last].clone().requires_grad_()
    options: dict[str, Any] = {
        "group": group,
        "vocab_start": first,
        "temperature": 0.7,
        "chunk_size": chunk_size,
        "bias_shard": bias,
    }
    logprobs = vocab_parallel_logprobs_from_hidden(hidden, weight, token_ids, **options)
    (logprobs * upstream).sum().backward()
    none = vocab_parallel_logprobs_from_hidden(hidden[:0], weight, token_ids[:0], **options)
    none.sum().backward()
    tops = [
        vocab_parallel_topk_logprobs_from_hidden(hidden, weight, k=k, num_ids=num_ids, **options)
        for k, num_ids in ((3, 11), (5, 8), (4, 4))
    ]
    gradients = [hidden.grad, weight.grad, bias.grad]
    return {"logprobs": logprobs.detach(), "gradients": gradients, "tops": tops, "none": none.shape}


def test_two_ranks_agree_with_the_full_head() -> None:
    hidden, weight, bias, token_ids, upstream = inputs()
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    options: dict[str, Any] = {"temperature": 0.7, "chunk_size": 4, "bias": bias}
    expected = token_logprobs_from_hidden(hidden, weight, token_ids, **options)
    (expected * upstream).sum().backward()

    for index, actual in enumerate(run_ranks(on_rank, 3, world_size=2)):
        torch.testing.assert_close(actual["logprobs"], expected.detach(), rtol=1e-12, atol=1e-12)
        first, last = STARTS[index]
        gradients = [leaves[0].grad, leaves[1].grad[first:last], leaves[2].grad[first:last]]
        for gradient, want in zip(actual["gradients"], gradients, strict=True):
            torch.testing.assert_close(gradient, want, rtol=1e-12, atol=1e-12)
        assert actual["none"] == (0, K)
        for (ids, top), (k, num_ids) in zip(actual["tops"], ((3, 11), (5, 8), (4, 4)), strict=True):
            want_ids, want_top = topk_logprobs_from_hidden(
                hidden, weight, k=k, num_ids=num_ids, **options
            )
            assert torch.equal(ids, want_ids)
            torch.testing.assert_close(top, want_top, rtol=1e-12, atol=1e-12)
