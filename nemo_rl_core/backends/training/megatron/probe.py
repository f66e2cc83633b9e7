"""A check that the installed attention separates packed sequences, also those of one prefix."""

from collections.abc import Callable

import torch

from nemo_rl_core.config.model import DType
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ModelError

_LENGTHS = (9, 5, 4)
PROBE_TOKENS = 18
"""The token budget at which the second and third sequence of the probe share a row."""


def refuse_unless_faithful(
    logprobs: Callable[[BatchedDataDict], torch.Tensor], *, dtype: DType
) -> None:
    """Compares logprobs of packed sequences with those of each sequence alone.

    Args:
        logprobs: `[B, T-1]` of a batch, packed within `PROBE_TOKENS`; a collective of all ranks.
        dtype: Dtype of the matrix products, which sets the tolerance.

    Raises:
        ModelError: If they differ.
    """
    width = max(_LENGTHS)
    batch = BatchedDataDict(
        {
            "input_ids": torch.arange(1, 1 + 3 * width).reshape(3, width) % 7,
            "input_lengths": torch.tensor(_LENGTHS),
            "token_mask": torch.ones(3, width - 1, dtype=torch.bool),
        }
    )
    # The third begins as the second, in a row with it.
    batch["input_ids"][2, :2] = batch["input_ids"][1, :2]
    alone = [logprobs(batch.select_indices([row])) for row in range(3)]
    difference = (logprobs(batch) - torch.cat(alone)).abs().max().item()
    bound = 1e-3 if dtype == "float32" else 0.3
    if not difference < bound:
        raise ModelError(
            "the model computes different logprobs for packed sequences",
            expected=f"a difference below {bound}",
            got=f"{difference:.3g}",
            fix="the installed attention does not keep packed sequences apart; use the dtensor "
            "backend",
        )
