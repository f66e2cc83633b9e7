"""Ranked pairs of sequences as a training batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl_core.data.chat import SupervisedExample
from nemo_rl_core.data.collate import collate
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict


@dataclass(frozen=True, slots=True)
class RankedPair:
    """Two sequences of which the first is better, by at least `margin` in the model's score.

    Example:
        >>> better = SupervisedExample(token_ids=(1, 5, 2), loss_mask=(False, True, True))
        >>> worse = SupervisedExample(token_ids=(1, 6, 2), loss_mask=(False, True, True))
        >>> RankedPair(better, worse).margin
        0.0
    """

    chosen: SupervisedExample
    rejected: SupervisedExample
    margin: float = 0.0


def reward_model_batch(pairs: Sequence[RankedPair]) -> BatchedDataDict:
    """Pairs as a batch of `B = 2 P` rows: chosen, rejected, chosen, rejected, and so on.

    Args:
        pairs: `P` pairs.

    Returns:
        What `collate` returns, `pair_ids [B]` int64, `is_chosen [B]` bool, `margins [B]`.
    """
    examples = [example for pair in pairs for example in (pair.chosen, pair.rejected)]
    batch = collate(
        [example.token_ids for example in examples], [example.loss_mask for example in examples]
    )
    batch.update(
        pair_ids=torch.arange(len(pairs)).repeat_interleave(2),
        is_chosen=torch.tensor([True, False]).repeat(len(pairs)),
        margins=torch.tensor([pair.margin for pair in pairs]).repeat_interleave(2),
    )
    return batch
