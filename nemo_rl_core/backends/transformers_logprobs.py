"""Logprobs of transformers' model classes, the reference for engines and conversions."""

from pathlib import Path

import torch
from torch import Tensor

from nemo_rl_core.backends.training.dtensor.loading import load_causal_model
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.planning.model_parts import reset_rotary


@torch.no_grad()
def transformers_logprobs(
    folder: Path,
    batch: BatchedDataDict,
    *,
    dtype: torch.dtype = torch.float32,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Computes logprobs of whole sequences with transformers' model class, on the CPU.

    Args:
        folder: A transformers folder.
        batch: `input_ids [B, T]` and `input_lengths [B]`.
        dtype: Dtype of weights and activations.
        repetition_penalty: As in `SamplingConfig`, over all earlier tokens.

    Returns:
        `[B, T-1]`, in nats at temperature 1, of each token given those before it; each row alone,
        0 past its end.

    Raises:
        ModelError: If the folder lacks weights.
    """
    model = load_causal_model(folder, dtype=dtype)
    result = torch.zeros(batch["input_ids"][:, 1:].shape)
    known: dict[tuple[int, ...], Tensor] = {}
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row, :length]
        key = tuple(ids.tolist())
        if key not in known:
            reset_rotary(model)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            logprobs = torch.log_softmax(_penalized(logits, ids[:-1], repetition_penalty), dim=-1)
            known[key] = logprobs.gather(-1, ids[1:, None])[:, 0]
        result[row, : length - 1] = known[key]
    return result


def _penalized(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """`[L, V]` logits after each of `ids [L]`, penalized for the tokens up to that position."""
    seen = torch.nn.functional.one_hot(ids, logits.shape[1]).cumsum(dim=0) > 0
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, lowered, logits)
