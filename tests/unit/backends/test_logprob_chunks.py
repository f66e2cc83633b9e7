"""Heads of large vocabularies compute as many rows at once as fit the byte budget."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_core.backends.training.dtensor.model import token_logprobs, topk_logprobs
from nemo_rl_core.functional.logprobs import LOGITS_BYTES

N, D, V = 170, 2, 151_936


class MostBytes(TorchDispatchMode):
    """The largest float32 tensor `[*, V]` that an operation has returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.shape[-1:] == (V,):
                self.largest = max(self.largest, leaf.nbytes)
        return result


def test_no_logits_of_a_large_vocabulary_exceed_their_share_of_the_budget():
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(D, V, bias=False)
    hidden = torch.randn(N, D, generator=generator, requires_grad=True)
    ids = torch.randint(V, (N, 1), generator=generator)
    with MostBytes() as seen:
        token_logprobs(hidden, head, ids, temperature=1.0).sum().backward()
    # By hand: 82 rows of 151,936 numbers of 4 bytes; all 170 would be 103,316,480, which
    # exceeds the budget together with their gradient.
    assert seen.largest == 49_835_008 <= LOGITS_BYTES / 4

    with MostBytes() as seen:
        topk_logprobs(hidden, head, k=2, num_ids=V, temperature=1.0)
    assert seen.largest == 49_835_008
