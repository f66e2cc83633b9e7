"""A check that the installed attention separates packed sequences, also those of one prefix."""

from collections.abc import Callable, Iterable

import torch

from nemo_rl_core.backends.training.rounding import rounding_bound, size_of
from nemo_rl_core.config.model import DType
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ModelError

_LENGTHS = (9, 5, 4)
PROBE_TOKENS = 18
"""The token budget at which the second and third sequence of the probe share a row."""


def refuse_unless_faithful(
    logprobs: Callable[[BatchedDataDict], torch.Tensor],
    layers: Iterable[torch.nn.Module],
    *,
    dtype: DType,
) -> None:
    """Compares logprobs of packed sequences with those of each sequence alone.

    Args:
        logprobs: `[B, T-1]` of a batch, packed within `PROBE_TOKENS`; a collective of all ranks.
        layers: The decoder's layers of this rank.
        dtype: Dtype of the matrix products.

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
    separate = [logprobs(batch.select_indices([row])) for row in range(3)]
    mask = torch.arange(1, width) < batch["input_lengths"][:, None]
    difference = size_of((logprobs(batch) - torch.cat(separate))[mask], dtype)
    bound = rounding_bound(lambda: logprobs(batch)[mask], layers, dtype)
    if not difference < bound:
        raise ModelError(
            "the model computes different logprobs for packed sequences",
            expected=f"a difference below {bound:.3g}",
            got=f"{difference:.3g}",
            fix="the installed attention does not keep packed sequences apart; use the dtensor "
            "backend",
        )
