"""Logprobs from final hidden states, over the ranks that split the vocabulary."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from nemo_rl_core.backends.training.context_parallel import sum_parts
from nemo_rl_core.backends.training.megatron.packed import output_weight, own_positions
from nemo_rl_core.backends.training.padded import (
    Places,
    next_tokens,
    places_of,
    scatter,
    wanted_positions,
)
from nemo_rl_core.backends.training.vocab_parallel import (
    vocab_parallel_logprobs_from_hidden,
    vocab_parallel_topk_logprobs_from_hidden,
)
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import PackedRows
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
        self, hidden: torch.Tensor, batch: BatchedDataDict, rows: PackedRows
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
        self, hidden: torch.Tensor, batch: BatchedDataDict, rows: PackedRows
    ) -> torch.Tensor:
        """`[B, T-1]` logprobs of the next tokens where `token_mask` is set, in nats, else 0."""
        return self._token_logprobs(hidden, batch, rows, next_tokens(batch))[..., 0]

    def topk_logprobs(
        self,
        hidden: torch.Tensor,
        batch: BatchedDataDict,
        rows: PackedRows,
        *,
        k: int,
        num_ids: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k most likely next tokens where `token_mask [B, T-1]` is set.

        Returns:
            `[B, T-1, k]` int64 ids below `num_ids`, and `[B, T-1, k]` logprobs in nats, float32,
            normalized over the whole head; both 0 where the mask is not set.
        """
        mask = wanted_positions(batch)
        wanted, options = places_of(mask), self._options()

        def most_likely(picked: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return vocab_parallel_topk_logprobs_from_hidden(picked, k=k, num_ids=num_ids, **options)

        ids, logprobs = _read(hidden, rows, wanted, most_likely)
        return scatter(ids, wanted, mask.shape), scatter(logprobs, wanted, mask.shape)

    def _token_logprobs(
        self,
        hidden: torch.Tensor,
        batch: BatchedDataDict,
        rows: PackedRows,
        token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """`[B, T-1, K]` logprobs of `token_ids [B, T-1, K]`, 0 where the mask is not set."""
        mask = wanted_positions(batch)
        wanted, options = places_of(mask), self._options()
        wanted_ids = token_ids[wanted]

        def chosen(picked: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ids = wanted_ids[numbers]
            return (vocab_parallel_logprobs_from_hidden(picked, token_ids=ids, **options),)

        return scatter(_read(hidden, rows, wanted, chosen)[0], wanted, mask.shape)

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
            "chunk_size": rows_at_once(-(-self._vocab_size // group.size())),
        }


def _read(
    hidden: torch.Tensor,
    rows: PackedRows,
    wanted: Places,
    head: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...]:
    """Applies a head to hidden states of tokens; the same result on all context ranks.

    Args:
        hidden: `[M, D]` at this rank's `own_positions`.
        rows: Positions of the tokens.
        wanted: The N tokens.
        head: Called with the hidden states and indices of this rank's tokens among the N.

    Returns:
        The head's outputs, each `[N, ...]`.
    """
    position = rows.row[wanted] * rows.position_ids.shape[1] + rows.column[wanted]
    numbers = torch.arange(len(position), device=position.device)
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return head(hidden[position], numbers)
    positions_here = own_positions(rows)
    index = position.new_full((rows.position_ids.numel(),), -1)
    held = positions_here >= 0
    index[positions_here[held]] = held.nonzero()[:, 0]
    numbers = numbers[index[position] >= 0]
    parts = head(hidden[index[position[numbers]]], numbers)
    wholes = (
        part.new_zeros(len(position), *part.shape[1:]).index_put((numbers,), part) for part in parts
    )
    return tuple(sum_parts(whole, group) for whole in wholes)
