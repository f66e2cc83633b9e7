"""Logprobs from final hidden states, over the ranks that split the vocabulary."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from nemo_rl_core.backends.training.context_parallel import spread_parts
from nemo_rl_core.backends.training.megatron.packed import output_weight
from nemo_rl_core.backends.training.megatron.rows import MegatronRows
from nemo_rl_core.backends.training.padded import loss_inputs, next_tokens, scatter
from nemo_rl_core.backends.training.vocab_parallel import (
    vocab_parallel_logprobs_from_hidden,
    vocab_parallel_topk_logprobs_from_hidden,
)
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.logprobs import rows_at_once


class LogprobHead:
    """The head of the last pipeline stage; `[N, V]` logits are never materialized."""

    def __init__(self, model: Any, *, vocab_size: int, temperature: float) -> None:
        self._model, self._vocab_size, self._temperature = model, vocab_size, temperature

    def loss_inputs(
        self, hidden: torch.Tensor, batch: BatchedDataDict, rows: MegatronRows
    ) -> tuple[torch.Tensor, BatchedDataDict]:
        """Returns the logprobs and the batch of `padded.loss_inputs`."""
        return loss_inputs(batch, partial(self._token_logprobs, hidden, batch, rows))

    def logprobs(
        self, hidden: torch.Tensor, batch: BatchedDataDict, rows: MegatronRows
    ) -> torch.Tensor:
        """Returns `[B, T-1]` logprobs of next tokens where `token_mask` is set, in nats, else 0."""
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
        """Returns the k most likely next tokens below `num_ids`; see `LogprobModel`."""
        selected, shape, options = rows.selected, batch["token_mask"].shape, self._options()

        def most_likely(states: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return vocab_parallel_topk_logprobs_from_hidden(states, k=k, num_ids=num_ids, **options)

        ids, logprobs = _read(hidden, rows, most_likely)
        return scatter(ids, selected, shape), scatter(logprobs, selected, shape)

    def _token_logprobs(
        self,
        hidden: torch.Tensor,
        batch: BatchedDataDict,
        rows: MegatronRows,
        token_ids: torch.Tensor,
    ) -> torch.Tensor:
        selected_ids, options = token_ids[rows.selected], self._options()

        def chosen(states: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ids = selected_ids[indices]
            return (vocab_parallel_logprobs_from_hidden(states, token_ids=ids, **options),)

        logprobs = _read(hidden, rows, chosen)[0]
        return scatter(logprobs, rows.selected, batch["token_mask"].shape)

    def _options(self) -> dict[str, Any]:
        group = parallel_state.get_tensor_model_parallel_group()
        weight, start = output_weight(self._model, self._vocab_size)
        return {
            "weight_shard": weight,
            "group": group,
            "vocab_start": start,
            "temperature": self._temperature,
            # Each chunk runs a collective, so every rank needs the same number of chunks.
            "chunk_size": rows_at_once(-(-self._vocab_size // group.size()), weight.device),
        }


def _read(
    hidden: torch.Tensor,
    rows: MegatronRows,
    head: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...]:
    """Applies a head to `[M, D]` hidden states; returns `[N, ...]` outputs on all context ranks."""
    num_selected, local = len(rows.selected[0]), rows.local
    if local is None:
        return head(hidden[rows.hidden_index], torch.arange(num_selected, device=hidden.device))
    group = parallel_state.get_context_parallel_group()
    return spread_parts(head(hidden[rows.hidden_index], local), local, num_selected, group)
