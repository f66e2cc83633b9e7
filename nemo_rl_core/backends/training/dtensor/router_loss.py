"""The load-balancing loss of a mixture of experts."""

from collections.abc import Sequence

import torch
from torch import Tensor


def load_balancing_losses(
    router_logits: Sequence[Tensor], sequence_ids: Tensor, *, num_sequences: int, top_k: int
) -> Tensor:
    """The load-balancing loss of each sequence, as transformers computes it for one sequence alone.

    `E * sum_e f_e * p_e`, where `f_e` counts how often a token of the sequence has expert e among
    its `top_k` most likely ones and `p_e` is the mean probability of expert e, both per token and
    layer: Switch Transformer (Fedus et al., 2021), equations 4 to 6, for each sequence as in
    DeepSeek-V3 (2024), section 2.1.2. No other sequence enters, so the values depend on neither
    micro-batches nor ranks.

    Args:
        router_logits: `[N, E]` of each layer with experts.
        sequence_ids: `[N]` sequence of each token, or `num_sequences` for padding.
        num_sequences: B.
        top_k: Experts that compute each token.

    Returns:
        `[B]` float32; `top_k` where all experts are used alike, more where they are not.
    """
    num_experts = router_logits[0].shape[-1]
    sums = torch.zeros(2, num_sequences + 1, num_experts, device=sequence_ids.device)
    for logits in router_logits:
        probs = logits.float().softmax(-1)
        chosen = torch.zeros_like(probs).scatter(-1, probs.topk(top_k).indices, 1.0)
        sums = sums.index_add(1, sequence_ids, torch.stack([chosen, probs]))
    # Probabilities of a token sum to 1.
    frequencies, probabilities = sums[:, :num_sequences] / sums[1, :num_sequences].sum(-1)[:, None]
    losses: Tensor = num_experts * (frequencies * probabilities).sum(-1)
    return losses
