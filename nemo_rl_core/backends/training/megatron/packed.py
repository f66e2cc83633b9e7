"""Hidden states of packed rows out of one chunk of a Megatron model.

`GPTModel.forward` reads rope off the row's length and ends in logits; here its embedding and its
decoder are called in its stead, so that rope restarts with each sequence and `[N, V]` never exists.
"""

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams

from nemo_rl_core.backends.training.megatron.model import has_transformer_engine
from nemo_rl_core.data.packing import PackedRows


def hidden_states(model: Any, rows: PackedRows) -> torch.Tensor:
    """What a chunk of the model makes of packed rows, or of what the chunk before it sent.

    Args:
        model: A `GPTModel`, not wrapped.
        rows: The micro-batch; ids are read by the first chunk only, positions by all.

    Returns:
        `[R, L, D]` final hidden states from the last chunk; from the others `[L, R, D]` to send on
        (`[R L, 1, D]` with Transformer Engine), under sequence parallelism a part of the first
        dimension.
    """
    num_rows, row_length = rows.position_ids.shape
    if has_transformer_engine():
        rows = _one_row(rows)
    embedded = _embedded(model, rows) if model.pre_process else None
    hidden: torch.Tensor = model.decoder(hidden_states=embedded, **_attention_inputs(model, rows))
    if not model.post_process:
        return hidden
    if model.config.sequence_parallel:
        # The logprobs' gradient is whole on every rank, so each keeps its part and sums nothing.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False
        )
    return hidden.transpose(0, 1).reshape(num_rows, row_length, -1)


def _attention_inputs(model: Any, rows: PackedRows) -> dict[str, Any]:
    """What tells the decoder which tokens belong together, and where each stands."""
    # [P, 1, 1, d] of positions 0 to P-1.
    table = model.rotary_pos_emb(int(rows.position_ids.max()) + 1)
    if has_transformer_engine():
        # Its kernels take the borders of sequences, and restart rope at each; a mask of single
        # tokens they would not look at.
        return {
            "attention_mask": None,
            "rotary_pos_emb": table,
            "packed_seq_params": sequence_borders(rows.position_ids[0]),
        }
    return {
        "attention_mask": other_sequences(rows.position_ids),
        "rotary_pos_emb": table[rows.position_ids.T, 0],  # [L, R, 1, d]
    }


def _one_row(rows: PackedRows) -> PackedRows:
    """All rows behind one another; `row` and `column` keep naming places in the rows given."""
    return replace(
        rows, input_ids=rows.input_ids.view(1, -1), position_ids=rows.position_ids.view(1, -1)
    )


def sequence_borders(position_ids: torch.Tensor) -> PackedSeqParams:
    """Where sequences begin and end in one row, as Transformer Engine wants it.

    Args:
        position_ids: `[L]`; 0 begins a sequence.
    """
    end = position_ids.new_tensor([len(position_ids)])
    borders = torch.cat([(position_ids == 0).nonzero()[:, 0], end]).int()
    longest = int(borders.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _embedded(model: Any, rows: PackedRows) -> torch.Tensor:
    """`[L, R, D]`, this rank's part of L under sequence parallelism."""
    embedded: torch.Tensor = model.embedding(
        input_ids=rows.input_ids, position_ids=rows.position_ids
    )
    padding_id = model.hf_config.pad_token_id
    if padding_id is None:
        return embedded
    # transformers' embeddings learn nothing from the padding token, wherever it stands; in many
    # models it also ends sequences.
    is_padding = (rows.input_ids == padding_id).T.contiguous()
    if model.config.sequence_parallel:
        parts = is_padding.chunk(model.config.tensor_model_parallel_size)
        is_padding = parts[parallel_state.get_tensor_model_parallel_rank()]
    return torch.where(is_padding[..., None], embedded.detach(), embedded)


def other_sequences(position_ids: torch.Tensor) -> torch.Tensor:
    """Which tokens of its row a token must not see: later ones, and those of other sequences.

    Args:
        position_ids: `[R, L]`; 0 begins a sequence.

    Returns:
        `[R, 1, L, L]` bool, query before key, True where attention is forbidden.
    """
    sequence = torch.cumsum(position_ids == 0, dim=1)
    other = sequence[:, :, None] != sequence[:, None, :]
    length = position_ids.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).triu(1)
    return (other | later)[:, None]


def output_weight(model: Any, vocab_size: int) -> tuple[torch.Tensor, int]:
    """This rank's part of the head, and the token that its first row stands for.

    Args:
        model: The last chunk of the model, not wrapped.
        vocab_size: Rows of the transformers head. Megatron fills up to a multiple of the ranks;
            those rows stand for no token and would take probability from the others.

    Returns:
        `[V', D]`, and a token id.
    """
    weight = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
    start = weight.shape[0] * parallel_state.get_tensor_model_parallel_rank()
    return weight[: max(0, min(weight.shape[0], vocab_size - start))], start
