"""Forward and backward passes over micro-batches with Megatron's schedules.

Megatron divides a loss by the number of micro-batches, and gradients by the number of data-parallel
ranks. Losses are already divided by counts of the full step, so `calculate_per_token_loss` disables
both, and `sum_gradients` omits the division by tokens that this option implies.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model

from nemo_rl_core.backends.training.megatron.packed import hidden_states
from nemo_rl_core.backends.training.megatron.parts import MegatronMicrobatch

Consume = Callable[[torch.Tensor, MegatronMicrobatch], tuple[torch.Tensor, Any]]
"""Maps `[M, D]` hidden states at `rank_positions` and their part to a loss and a result."""


def sum_gradients(chunks: list[Any], num_tokens: object = None, **groups: Any) -> None:
    """Sums gradients over all ranks that share a weight, without division."""
    finalize_model_grads(chunks, None, **groups)


def run_parts(
    chunks: list[Any], parts: Sequence[MegatronMicrobatch], consume: Consume, *, forward_only: bool
) -> list[Any]:
    """Runs all micro-batches, and accumulates the gradients of their losses unless `forward_only`.

    Args:
        parts: Micro-batches, the same number on every rank, at least one.
        consume: Function called on the last pipeline stage for each part except fillers.

    Returns:
        Results of `consume` in the order of the parts, without fillers; empty on other stages.
    """
    iterators = [iter(parts) for _ in chunks]
    with torch.set_grad_enabled(not forward_only):
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=_forward_step(consume),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(parts),
            # Micro-batches differ in rows and lengths, so stages exchange the shapes
            # (`variable_seq_lengths`), and these two are not used.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return [result for result in results if result is not None]


def _forward_step(
    consume: Consume,
) -> Callable[[Iterator[MegatronMicrobatch], Any], tuple[torch.Tensor, Any]]:
    def step(iterator: Iterator[MegatronMicrobatch], chunk: Any) -> tuple[torch.Tensor, Any]:
        part = next(iterator)
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)

        def finish(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            # A filler also needs a backward pass, since other ranks wait for it.
            loss, kept = consume(hidden, part) if part.indices else (hidden.sum() * 0, None)
            # Not used: see `sum_gradients`.
            num_tokens = torch.zeros((), dtype=torch.int, device=hidden.device)
            return loss, num_tokens, kept

        return hidden_states(model, part.rows), finish

    return step
