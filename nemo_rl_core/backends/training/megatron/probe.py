"""A check that the installed attention separates packed sequences and supports prefix trees."""

from collections.abc import Callable, Iterable

import torch

from nemo_rl_core.backends.training.rounding import rounding_bound, size_of
from nemo_rl_core.config.model import DType
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ModelError

_LENGTHS = (9, 5, 4)
PROBE_TOKENS = 18
"""Token budget that puts the second and third sequence of the probe into one row."""


def refuse_unless_faithful(
    logprobs: Callable[[BatchedDataDict], torch.Tensor],
    layers: Iterable[torch.nn.Module],
    *,
    dtype: DType,
) -> None:
    """Raises `ModelError` if packing changes logprobs by more than rounding does."""
    width = max(_LENGTHS)
    batch = BatchedDataDict(
        {
            "input_ids": torch.arange(1, 1 + 3 * width).reshape(3, width) % 7,
            "input_lengths": torch.tensor(_LENGTHS),
            "token_mask": torch.ones(3, width - 1, dtype=torch.bool),
        }
    )
    # The third sequence begins like the second one, with which it shares a row.
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
            fix="use the dtensor backend; the installed attention does not separate packed "
            "sequences",
        )
