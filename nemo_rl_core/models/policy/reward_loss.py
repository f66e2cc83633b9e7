"""The loss of a step that needs only completions and their rewards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nemo_rl_core.errors import DataError
from nemo_rl_core.functional.masked import masked_sum, valid_token_mask, zero_masked
from nemo_rl_core.functional.policy_gradient import reinforce


@dataclass(frozen=True)
class RewardLossFn:
    """REINFORCE with the batch's mean reward as its baseline: Williams (1992).

    `-sum((reward - mean reward) * logprob) / Z_tok`, where `Z_tok` is `global_valid_tokens`.
    """

    columns: ClassVar = ("advantages",)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: Mapping[str, Tensor],
        *,
        global_valid_seqs: Tensor,
        global_valid_tokens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch; see `LossFunction` for shapes and normalization."""
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        current = zero_masked(next_token_logprobs, mask)
        values = reinforce(current, zero_masked(batch["advantages"], mask))
        loss = masked_sum(values, mask, denominator=global_valid_tokens)
        return loss, {"loss": loss.detach()}


def as_rewards(value: Any, *, num_rows: int) -> Tensor | None:
    """Returns `[B]` rewards if a step was given rewards instead of a loss; None for a loss.

    Args:
        value: A loss, a tensor or list of rewards, or an `EnvironmentReturn`.
    """
    value = getattr(value, "rewards", value)
    if callable(value):
        return None
    rewards = torch.as_tensor(value, dtype=torch.float32)
    if tuple(rewards.shape) != (num_rows,):
        raise DataError(
            "a batch needs one reward per row",
            expected=f"[{num_rows}] rewards, or a loss function",
            got=f"rewards of the shape {list(rewards.shape)}",
            fix="score each row of the batch once",
        )
    return rewards
