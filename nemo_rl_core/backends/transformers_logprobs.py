"""Logprobs of transformers' model classes, as a reference for engines and conversions."""

from pathlib import Path

import torch
from torch import Tensor

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.model_files.loading import load_causal_model
from nemo_rl_core.planning.model_parts import reset_rotary


@torch.no_grad()
def transformers_logprobs(
    folder: Path,
    batch: BatchedDataDict,
    *,
    dtype: torch.dtype = torch.float32,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Computes `[B, T-1]` logprobs of complete sequences with transformers' class, on the CPU.

    They are in nats at temperature 1, and 0 in the padding. Rows are computed separately.

    Raises:
        ModelError: If weights are missing in the folder.
    """
    model = load_causal_model(folder, dtype=dtype)
    result = torch.zeros(batch["input_ids"][:, 1:].shape)
    computed: dict[tuple[int, ...], Tensor] = {}
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row, :length]
        key = tuple(ids.tolist())
        if key not in computed:
            reset_rotary(model)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            logprobs = torch.log_softmax(_penalized(logits, ids[:-1], repetition_penalty), dim=-1)
            computed[key] = logprobs.gather(-1, ids[1:, None])[:, 0]
        result[row, : length - 1] = computed[key]
    return result


def _penalized(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Penalizes `[L, V]` logits after each of `ids [L]` for the tokens up to that position."""
    seen = torch.nn.functional.one_hot(ids, logits.shape[1]).cumsum(dim=0) > 0
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, lowered, logits)
