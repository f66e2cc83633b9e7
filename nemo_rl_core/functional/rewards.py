"""Reward shaping: length penalties, assignment to tokens, and returns."""

import torch
from torch import Tensor

from nemo_rl_core.functional.masked import zero_masked


def overlong_penalty(
    lengths: Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float
) -> Tensor:
    """Returns the penalty of long completions: 0 up to the buffer, then linear to `-penalty`.

    `-(length - (max_tokens - buffer_tokens)) / buffer_tokens * penalty`, bounded to
    `[-penalty, 0]`. Source: the soft overlong punishment of DAPO, Yu et al. 2025, arXiv:2503.14476,
    equation 13.

    Args:
        lengths: `[B]` tokens of each rollout that count towards `max_tokens`, including the
            environment's.
        max_tokens: Maximum length of a completion.
        buffer_tokens: The length of the slope, at least 1 and at most `max_tokens`.
        penalty: Penalty at `max_tokens`, 0 or more.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"the overlong buffer ({buffer_tokens} tokens) must be between 1 and the longest "
            f"completion ({max_tokens} tokens); set overlong.buffer_tokens to about a fifth of it"
        )
    excess = lengths.float() - (max_tokens - buffer_tokens)
    return (-excess / buffer_tokens * penalty).clamp(-penalty, 0)


def outcome_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """Returns `[B, T-1]` with the score of each sequence at its last valid token, and 0 elsewhere.

    A row without a valid token loses its score.
    """
    # Counted from the end, the last valid token is the first with count 1.
    valid_from_here = mask.flip(-1).cumsum(-1).flip(-1)
    is_last = mask & (valid_from_here == 1)
    return zero_masked(scores[:, None].expand(mask.shape), is_last)


def returns_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """Returns the undiscounted sum of rewards from each valid token to its sequence's end."""
    sums = torch.flip(zero_masked(rewards, mask).flip(-1).cumsum(-1), dims=(-1,))
    return zero_masked(sums, mask)
