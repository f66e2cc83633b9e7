"""The interface between algorithms, which define losses, and backends, which run them."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class LossFunction(Protocol):
    """A pure function of tensors whose micro-batch values sum to those of the optimizer step."""

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: Mapping[str, Tensor],
        *,
        global_valid_seqs: Tensor,
        global_valid_tokens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the loss of a micro-batch and its metrics.

        Args:
            next_token_logprobs: `[B, T-1]` under the weights being trained, requiring gradients;
                position t is the logprob of token t+1, in nats.
            batch: `token_mask [B, T-1]`, `sample_mask [B]`, and the columns that the loss reads.
            global_valid_seqs: 0-dim; sequences whose `sample_mask` is set in the full optimizer
                step, over all micro-batches and ranks; rows with `sequence_weights` count as those.
            global_valid_tokens: 0-dim; tokens whose masks are both set in the full step.

        Returns:
            The 0-dim loss, and detached 0-dim metrics, both divided by the global counts, so that
            the sum over micro-batches is the value of the step.
        """
        ...
