"""A custom loss and a custom advantage of tokens, for recipes."""

from typing import Any

from torch import Tensor

from nemo_rl_core.functional.advantages import group_normalized
from nemo_rl_core.functional.masked import masked_sum, valid_token_mask, zero_masked


def reinforce(
    next_token_logprobs: Tensor,
    batch: Any,
    *,
    global_valid_seqs: Tensor,
    global_valid_tokens: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`-A cur` per token, with the columns of GRPO."""
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    logprobs = zero_masked(next_token_logprobs, mask)
    assert {"prev_logprobs", "generation_logprobs", "reference_logprobs"} <= batch.keys()
    loss = masked_sum(-batch["advantages"] * logprobs, mask, denominator=global_valid_tokens)
    return loss, {"my_metric": masked_sum(mask * 1.0, mask, denominator=global_valid_tokens)}


def of_tokens(rewards: Tensor, groups: Tensor, token_mask: Tensor) -> Tensor:
    """`group_normalized`, for each token."""
    return group_normalized(rewards, groups)[:, None].expand(token_mask.shape)
