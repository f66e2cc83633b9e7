"""Collation of token sequences into a padded batch with masks."""

from collections.abc import Sequence

import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict


def collate(
    sequences: Sequence[Sequence[int]], loss_masks: Sequence[Sequence[bool]]
) -> BatchedDataDict:
    """Pads sequences on the right and shifts their masks to next-token positions.

    Args:
        sequences: Token ids of each sequence, at least two.
        loss_masks: For each token, True if it is trained on; the first token never is.

    Returns:
        `input_ids [B, T]`, `input_lengths [B]`, `token_mask [B, T-1]` (position t stands for token
        t+1), `sample_mask [B]` of ones.

    Example:
        >>> collate([[5, 6, 7]], [[False, False, True]])["token_mask"]
        tensor([[False,  True]])
    """
    width = max(len(sequence) for sequence in sequences)
    input_ids = torch.zeros(len(sequences), width, dtype=torch.long)
    token_mask = torch.zeros(len(sequences), width - 1, dtype=torch.bool)
    for row, (sequence, mask) in enumerate(zip(sequences, loss_masks, strict=True)):
        if len(sequence) != len(mask):
            raise ValueError(f"sequence {row}: {len(sequence)} tokens but {len(mask)} mask values")
        input_ids[row, : len(sequence)] = torch.tensor(sequence)
        token_mask[row, : len(sequence) - 1] = torch.tensor(mask[1:])
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": torch.tensor([len(sequence) for sequence in sequences]),
            "token_mask": token_mask,
            "sample_mask": torch.ones(len(sequences)),
        }
    )
