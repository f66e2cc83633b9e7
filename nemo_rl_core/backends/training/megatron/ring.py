"""How Transformer Engine's ring attention wants packed sequences over context ranks.

Each sequence is cut into twice as many parts as there are ranks; a rank takes one from the front
and one from the back, so that causal attention costs every rank the same (Brandon et al. 2023,
arXiv:2311.09431). Sequences are filled up at their ends, where no token of theirs sees the filler.
"""

import torch


def ring_borders(position_ids: torch.Tensor, num_ranks: int, num_tensor: int) -> torch.Tensor:
    """`[S + 1]` int32: where each of S sequences, filled up, begins, and where the last one ends.

    Args:
        position_ids: `[L]` of one row; 0 begins a sequence.
        num_ranks: Of the context axis; alone, nothing is filled up.
        num_tensor: Ranks that may share the tokens of each part.
    """
    lengths = _sequences(position_ids)[1]
    multiple = _parts(num_ranks) * (num_tensor if num_ranks > 1 else 1)
    filled = (lengths + multiple - 1) // multiple * multiple
    return torch.cat([filled.new_zeros(1), filled.cumsum(0)]).int()


def ring_places(
    position_ids: torch.Tensor, num_ranks: int, rank: int, num_tensor: int
) -> torch.Tensor:
    """`[M]`: which place of the row each token of a rank has; -1 for filler.

    Args:
        position_ids: `[L]` of one row; 0 begins a sequence.
        num_ranks: Of the context axis.
        rank: One of them.
        num_tensor: Ranks that may share the tokens of each part.
    """
    starts, lengths = _sequences(position_ids)
    borders = ring_borders(position_ids, num_ranks, num_tensor).long()
    filled, parts = borders.diff(), _parts(num_ranks)
    # All places with filler, each with the sequence it is of and its offset in it.
    sequence = torch.repeat_interleave(filled)
    offset = torch.arange(len(sequence), device=sequence.device) - borders[sequence]
    place = torch.where(offset < lengths[sequence], starts[sequence] + offset, -1)
    part = offset * parts // filled[sequence]
    return place[(part == rank) | (part == parts - 1 - rank)]


def _parts(num_ranks: int) -> int:
    return 2 * num_ranks if num_ranks > 1 else 1


def _sequences(position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[S]` first places, and `[S]` lengths."""
    starts = (position_ids == 0).nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([len(position_ids)])])
    return starts, ends - starts
