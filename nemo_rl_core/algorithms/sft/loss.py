"""The loss of supervised fine-tuning."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nemo_rl_core.functional.masked import masked_sum, valid_token_mask


@dataclass(frozen=True)
class NLLLoss:
    """Negative log-likelihood per valid token: `-sum(cur * m) / Z_tok`, in nats.

    Example:
        >>> import torch
        >>> masks = {"token_mask": torch.tensor([[0, 1, 1]]), "sample_mask": torch.tensor([1])}
        >>> two, one = torch.tensor(2.0), torch.tensor(1.0)
        >>> logprobs = torch.tensor([[float("nan"), -1.0, -3.0]])
        >>> NLLLoss()(logprobs, masks, global_valid_seqs=one, global_valid_tokens=two)[0]
        tensor(2.)
    """

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: Mapping[str, Tensor],
        *,
        global_valid_seqs: Tensor,
        global_valid_tokens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch and the metric `loss`; see `LossFunction`."""
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        loss = masked_sum(-next_token_logprobs, mask, denominator=global_valid_tokens)
        return loss, {"loss": loss.detach()}


SFTLossFn = NLLLoss
"""Alias of `NLLLoss`, named like `GRPOLossFn`."""
