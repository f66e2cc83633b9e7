"""Layout of packed sequences over context ranks for Transformer Engine's ring attention.

Each sequence is split into twice as many parts as there are ranks; a rank takes one from the front
and one from the back, so that causal attention has equal cost on every rank (Brandon et al. 2023,
arXiv:2311.09431). Sequences are padded at their ends, which no token attends to.
"""

import torch


def ring_boundaries(position_ids: torch.Tensor, num_ranks: int, num_tensor: int) -> torch.Tensor:
    """`[S + 1]` int32 starts of S padded sequences, and the end of the last one.

    Args:
        position_ids: `[L]` of one row; 0 begins a sequence.
        num_ranks: Ranks of the context axis; one rank needs no padding.
        num_tensor: Ranks that may share the tokens of each part.
    """
    lengths = _sequences(position_ids)[1]
    multiple = _parts(num_ranks) * (num_tensor if num_ranks > 1 else 1)
    filled = (lengths + multiple - 1) // multiple * multiple
    return torch.cat([filled.new_zeros(1), filled.cumsum(0)]).int()


def ring_positions(
    position_ids: torch.Tensor, num_ranks: int, rank: int, num_tensor: int
) -> torch.Tensor:
    """`[M]` positions in the row of a rank's tokens; -1 for filler.

    Args:
        position_ids: `[L]` of one row; 0 begins a sequence.
        num_ranks: Ranks of the context axis.
        rank: Index of a rank among them.
        num_tensor: Ranks that may share the tokens of each part.
    """
    starts, lengths = _sequences(position_ids)
    borders = ring_boundaries(position_ids, num_ranks, num_tensor).long()
    filled, parts = borders.diff(), _parts(num_ranks)
    # All positions with filler, each with its sequence and its offset.
    sequence = torch.repeat_interleave(filled)
    offset = torch.arange(len(sequence), device=sequence.device) - borders[sequence]
    position = torch.where(offset < lengths[sequence], starts[sequence] + offset, -1)
    part = offset * parts // filled[sequence]
    return position[(part == rank) | (part == parts - 1 - rank)]


def _parts(num_ranks: int) -> int:
    return 2 * num_ranks if num_ranks > 1 else 1


def _sequences(position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[S]` first positions, and `[S]` lengths."""
    starts = (position_ids == 0).nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([len(position_ids)])])
    return starts, ends - starts
