"""The layout for Transformer Engine's ring attention, which no CPU can run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.backends.training.megatron.rows import ring_boundaries, ring_positions


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def test_rank_has_one_part_from_the_front_and_one_from_the_back() -> None:
    ids = positions([5, 2])  # padded to 8 and 4, in four parts of 2 and of 1
    assert ring_boundaries(ids, 2, 1).tolist() == [0, 8, 12]
    assert ring_positions(ids, 2, 0, 1).tolist() == [0, 1, -1, -1, 5, -1]
    assert ring_positions(ids, 2, 1, 1).tolist() == [2, 3, 4, -1, 6, -1]


def test_single_rank_has_all_positions_and_no_filler() -> None:
    ids = positions([3, 1, 4])
    assert ring_boundaries(ids, 1, 2).tolist() == [0, 3, 4, 8]
    assert ring_positions(ids, 1, 0, 2).tolist() == list(range(8))


@pytest.mark.thorough
@settings(deadline=None)  # Megatron is imported
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    num_ranks=st.sampled_from([2, 3, 4]),
    num_tensor=st.sampled_from([1, 2]),
)
def test_every_token_has_one_rank_and_the_rotation_of_its_position(
    lengths: list[int], num_ranks: int, num_tensor: int
) -> None:
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    ids, table = positions(lengths), torch.arange(100)
    sizes = ring_boundaries(ids, num_ranks, num_tensor).diff() // num_ranks
    results = []
    for rank in range(num_ranks):
        indices = ring_positions(ids, num_ranks, rank, num_tensor)
        assert len(indices) % num_tensor == 0
        parts = [torch.zeros(size) for size in sizes.tolist()]
        rotated = torch.cat(
            [_get_thd_freqs_on_this_cp_rank(rank, num_ranks, part, table) for part in parts]
        )
        is_token = indices >= 0
        assert torch.equal(ids[indices[is_token]], rotated[is_token])
        results += indices[is_token].tolist()
    assert sorted(results) == list(range(sum(lengths)))
