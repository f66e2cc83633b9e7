"""Hidden states of packed rows from one chunk of a Megatron model.

`GPTModel.forward` derives rope from the row's length and returns logits. Here its embedding and
decoder are called instead, so that rope restarts with each sequence and `[N, V]` logits are never
materialized.
"""

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams

from nemo_rl_core.backends.training.context_parallel import packed_causal_mask
from nemo_rl_core.backends.training.megatron.rows import MegatronRows
from nemo_rl_core.backends.training.megatron.settings import has_transformer_engine


def hidden_states(model: Any, rows: MegatronRows) -> torch.Tensor:
    """Runs a chunk of the model on packed rows, or on the output of the previous chunk.

    Returns:
        `[M, D]` final hidden states at `rank_positions` from the last chunk. From the others
        `[L, R, D]` for the next chunk (`[M, 1, D]` with Transformer Engine); with context and
        sequence parallelism a part of the first dimension.
    """
    embedded = _embedded(model, rows) if model.pre_process else None
    inputs = _attention_inputs(model, rows)
    hidden: torch.Tensor = model.decoder(hidden_states=embedded, **inputs)
    if not model.post_process:
        return hidden
    if model.config.sequence_parallel:
        # The logprobs' gradient is replicated, so each rank keeps its part without a sum.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False
        )
    return hidden.transpose(0, 1).flatten(end_dim=1)


def _attention_inputs(model: Any, rows: MegatronRows) -> dict[str, Any]:
    if has_transformer_engine():
        return {
            "attention_mask": None,
            "rotary_pos_emb": model.rotary_pos_emb(rows.longest, packed_seq=True),
            "packed_seq_params": PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=rows.boundaries,
                cu_seqlens_kv=rows.boundaries,
                max_seqlen_q=rows.longest,
                max_seqlen_kv=rows.longest,
            ),
        }
    # [P, 1, 1, d] for positions 0 to P-1, complete on every context rank.
    table = model.rotary_pos_emb(rows.num_positions, packed_seq=True)
    group = parallel_state.get_context_parallel_group()
    return {
        "attention_mask": rows.boundaries
        if model.takes_boundaries
        else ~packed_causal_mask(rows.last, group),
        "rotary_pos_emb": table[rows.position_ids.T, 0],  # [L / ranks, R, 1, d]
    }


def _embedded(model: Any, rows: MegatronRows) -> torch.Tensor:
    """Returns `[L, R, D]` embeddings; with sequence parallelism this rank's part of L."""
    embedded: torch.Tensor = model.embedding(
        input_ids=rows.input_ids, position_ids=rows.position_ids
    )
    padding_id = model.hf_config.pad_token_id
    if padding_id is None:
        return embedded
    # transformers' embeddings have no gradient for the padding token at any position, although it
    # also ends sequences in many models.
    is_padding = (rows.input_ids == padding_id).T.contiguous()
    if model.config.sequence_parallel:
        parts = is_padding.chunk(model.config.tensor_model_parallel_size)
        is_padding = parts[parallel_state.get_tensor_model_parallel_rank()]
    return torch.where(is_padding[..., None], embedded.detach(), embedded)


def output_weight(model: Any, vocab_size: int) -> tuple[torch.Tensor, int]:
    """Returns this rank's part of the head, `[V', D]`, and the token id of its first row.

    Megatron's padding rows are left out, since they would take probability from tokens.
    """
    weight = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
    start = weight.shape[0] * parallel_state.get_tensor_model_parallel_rank()
    return weight[: max(0, min(weight.shape[0], vocab_size - start))], start
