"""Logprobs from final hidden states, over the ranks that split the vocabulary."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from nemo_rl_core.backends.training.context_parallel import sum_parts
from nemo_rl_core.backends.training.megatron.packed import output_weight
from nemo_rl_core.backends.training.megatron.rows import MegatronRows
from nemo_rl_core.backends.training.padded import next_tokens, scatter
from nemo_rl_core.backends.training.vocab_parallel import (
    vocab_parallel_logprobs_from_hidden,
    vocab_parallel_topk_logprobs_from_hidden,
)
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.logprobs import rows_at_once


class LogprobHead:
    """The head of the last pipeline stage; `[N, V]` logits are never materialized.

    Args:
        model: The last chunk of the model, not wrapped.
        vocab_size: Rows of the transformers head.
        temperature: Divisor of the logits.
    """

    def __init__(self, model: Any, *, vocab_size: int, temperature: float) -> None:
        self._model, self._vocab_size, self._temperature = model, vocab_size, temperature

    def loss_inputs(
        self, hidden: torch.Tensor, batch: BatchedDataDict, rows: MegatronRows
    ) -> tuple[torch.Tensor, BatchedDataDict]:
        """Logprobs `[B, T-1]`, and those of the batch's `topk_ids [B, T-1, K]` if it has any.

        The latter are added to the batch as `current_topk_logprobs [B, T-1, K]`.
        """
        if "topk_ids" not in batch:
            return self.logprobs(hidden, batch, rows), batch
        # Both in one pass, which computes each chunk of logits once.
        token_ids = torch.cat([next_tokens(batch), batch["topk_ids"]], dim=-1)
        logprobs = self._token_logprobs(hidden, batch, rows, token_ids)
        current = {"current_topk_logprobs": logprobs[..., 1:]}
        return logprobs[..., 0], BatchedDataDict({**batch, **current})

    def logprobs(
        self, hidden: torch.Tensor, batch: BatchedDataDict, rows: MegatronRows
    ) -> torch.Tensor:
        """`[B, T-1]` logprobs of the next tokens where `token_mask` is set, in nats, else 0."""
        return self._token_logprobs(hidden, batch, rows, next_tokens(batch))[..., 0]

    def topk_logprobs(
        self,
        hidden: torch.Tensor,
        batch: BatchedDataDict,
        rows: MegatronRows,
        *,
        k: int,
        num_ids: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k most likely next tokens where `token_mask [B, T-1]` is set.

        Returns:
            `[B, T-1, k]` int64 ids below `num_ids`, and `[B, T-1, k]` logprobs in nats, float32,
            normalized over the whole head; both 0 where the mask is not set.
        """
        wanted, shape, options = rows.wanted, batch["token_mask"].shape, self._options()

        def most_likely(picked: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return vocab_parallel_topk_logprobs_from_hidden(picked, k=k, num_ids=num_ids, **options)

        ids, logprobs = _read(hidden, rows, most_likely)
        return scatter(ids, wanted, shape), scatter(logprobs, wanted, shape)

    def _token_logprobs(
        self,
        hidden: torch.Tensor,
        batch: BatchedDataDict,
        rows: MegatronRows,
        token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """`[B, T-1, K]` logprobs of `token_ids [B, T-1, K]`, 0 where the mask is not set."""
        wanted_ids, options = token_ids[rows.wanted], self._options()

        def chosen(picked: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ids = wanted_ids[numbers]
            return (vocab_parallel_logprobs_from_hidden(picked, token_ids=ids, **options),)

        found = _read(hidden, rows, chosen)[0]
        return scatter(found, rows.wanted, batch["token_mask"].shape)

    def _options(self) -> dict[str, Any]:
        """This rank's rows of the head, and how they are read."""
        group = parallel_state.get_tensor_model_parallel_group()
        weight, start = output_weight(self._model, self._vocab_size)
        return {
            "weight_shard": weight,
            "group": group,
            "vocab_start": start,
            "temperature": self._temperature,
            # Chunks are collectives: every rank has as many, though padding leaves some fewer rows.
            "chunk_size": rows_at_once(-(-self._vocab_size // group.size()), weight.device),
        }


def _read(
    hidden: torch.Tensor,
    rows: MegatronRows,
    head: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...]:
    """Applies a head to hidden states of tokens; the same result on all context ranks.

    Args:
        hidden: `[M, D]` at this rank's `own_positions`.
        rows: The micro-batch, of which N tokens are wanted.
        head: Called with the hidden states and indices of this rank's tokens among the N.

    Returns:
        The head's outputs, each `[N, ...]`.
    """
    num_wanted, numbers = len(rows.wanted_row), rows.numbers
    if numbers is None:
        return head(hidden[rows.held], torch.arange(num_wanted, device=hidden.device))
    parts = head(hidden[rows.held], numbers)
    wholes = (
        part.new_zeros(num_wanted, *part.shape[1:]).index_put((numbers,), part) for part in parts
    )
    group = parallel_state.get_context_parallel_group()
    return tuple(sum_parts(whole, group) for whole in wholes)
