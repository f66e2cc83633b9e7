"""KV cache for generation, on one rank of a Megatron model.

The memory is Megatron-core's `StaticInferenceContext`, to which its attention appends. The next
tokens of all rows use the same slot, so prompts are padded on the left; a mask hides the padding,
and rope counts from each row's first token.

While decoding, Megatron-core does not pass a mask to Transformer Engine's attention, so generation
uses Megatron-core's local attention. This has not been run with other layers of Transformer Engine,
nor on a GPU.
"""

from typing import Any

import torch
from megatron.core.inference.communication_utils import (
    recv_from_prev_pipeline_rank_,
    send_to_next_pipeline_rank,
)
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

_MOST_SCORES = 2**28
"""Maximum number of attention scores over all heads at once: 1 GiB in float32."""


class KeyValueCache:
    """Keys and values of one call; each call creates a new one, so that none outlive an update.

    Args:
        model: A `GPTModel`, not wrapped, with all layers of this pipeline stage, whose
            `core_attention` applies masks. Without sequence and context parallelism.
        padding: `[B]` number of padding slots at the start of each row.
        num_slots: Maximum length of a row, padding included.
    """

    def __init__(
        self,
        model: Any,
        padding: torch.Tensor,
        num_slots: int,
        *,
        most_scores: int = _MOST_SCORES,
    ) -> None:
        self._model, self._padding = model, padding
        heads = model.config.num_attention_heads // model.config.tensor_model_parallel_size
        self._most_scores = most_scores // heads
        self._memory = StaticInferenceContext(len(padding), num_slots)
        slots = torch.arange(num_slots, device=padding.device)
        positions = (slots - padding[:, None]).clamp(min=0)
        table = model.rotary_pos_emb(num_slots, packed_seq=True)  # [S, 1, 1, d]
        # [S, B, 1, d] for all slots. Megatron selects those of the current tokens; it stores keys
        # without rope and applies rope in each step.
        self._rotary = table[positions.T, 0]

    @torch.no_grad()
    def append(self, input_ids: torch.Tensor) -> torch.Tensor | None:
        """Adds `[B, L]` ids to the end of all rows: the padded prompts at first, then new tokens.

        Returns `[B, D]` final hidden states of the last tokens; None on stages before the last.
        """
        memory, (num_rows, num_new) = self._memory, input_ids.shape
        end = memory.sequence_len_offset + num_new
        at_once = max(1, self._most_scores // (num_new * end))
        outputs = []
        for first in range(0, num_rows, at_once):
            memory.batch_size_offset = first
            outputs.append(self._append_to(slice(first, first + at_once), input_ids, end))
        memory.batch_size_offset = 0
        memory.increment_sequence_len_offset(num_new)
        hidden = [output for output in outputs if output is not None]
        return torch.cat(hidden) if hidden else None

    def _append_to(self, rows: slice, input_ids: torch.Tensor, end: int) -> torch.Tensor | None:
        model, input_ids = self._model, input_ids[rows]
        embedded = None
        if model.pre_process:
            embedded = model.embedding(input_ids=input_ids, position_ids=None)
        else:
            model.set_input_tensor(self._received(input_ids))
        hidden: torch.Tensor = model.decoder(
            hidden_states=embedded,
            attention_mask=_forbidden(self._padding[rows], end - input_ids.shape[1], end),
            rotary_pos_emb=self._rotary[:, rows],
            inference_context=self._memory,
        )
        if model.post_process:
            return hidden[-1]
        send_to_next_pipeline_rank(hidden)
        return None

    def select(self, rows: torch.Tensor) -> None:
        """Keeps only these rows, in this order; a row may be repeated."""
        memory = self._memory.key_value_memory_dict
        for layer, (keys, values) in memory.items():
            memory[layer] = keys[:, rows], values[:, rows]
        self._padding, self._rotary = self._padding[rows], self._rotary[:, rows]

    def _received(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Receives `[L, B, D]` hidden states of the same tokens from the previous stage."""
        config = self._model.config
        size = (*input_ids.T.shape, config.hidden_size)
        hidden = torch.empty(size, dtype=config.pipeline_dtype, device=input_ids.device)
        recv_from_prev_pipeline_rank_(hidden)
        return hidden


def _forbidden(padding: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Returns a `[B, 1, L, S]` mask for queries at these slots: True for padding and later keys."""
    slots = torch.arange(end, device=padding.device)
    later = slots > slots[start:, None]
    return (later | (slots < padding[:, None, None]))[:, None]


def attend_by_mask(model: Any) -> None:
    """Replaces attention in all layers with the local one, which applies masks."""
    for layer in model.decoder.layers:
        layer.self_attention.core_attention = DotProductAttention(
            model.config,
            layer.layer_number,
            AttnMaskType.causal,
            "self",
            softmax_scale=model.config.softmax_scale,
        )
