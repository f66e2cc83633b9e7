"""Trees of prefixes contain every sequence, which attends only to its own tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.backends.training.context_parallel import packed_causal_mask
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.packing.plan import Microbatch, pack
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing, PrefixTree, prefix_trees
from nemo_rl_core.distributed.packing.ranks import plan_shard, shard_for_training

FREE = PrefixSharing(pairs_per_token=1e9)
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=24)


def as_batch(sequences: list[list[int]], pairs: list[int] | None = None) -> BatchedDataDict:
    padded = [[*each, *[0] * (8 - len(each))] for each in sequences]
    batch = BatchedDataDict(
        {
            "input_ids": torch.tensor(padded),
            "input_lengths": torch.tensor([len(each) for each in sequences]),
        }
    )
    if pairs is not None:
        batch["pair_ids"] = torch.tensor(pairs)
    return batch


def test_a_tree_by_hand() -> None:
    # 5 6 | 7 8 and 5 6 | 7 9 share three tokens, 5 6 | 4 shares two with them, and 3 none.
    sequences = [[5, 6, 7, 9], [3], [5, 6, 4], [5, 6, 7, 8]]
    batch = as_batch(sequences)
    trees = prefix_trees(batch["input_ids"], batch["input_lengths"], sharing=FREE, max_tokens=9)
    assert trees == [PrefixTree((1,), (0,), 1), PrefixTree((2, 3, 0), (0, 2, 3), 6)]
    assert plan_shard(batch, max_tokens=12, sharing=FREE) == [
        Microbatch(rows=((2, 3, 0), (1,)), row_length=6, shared=(0, 2, 3, 0))
    ]


def test_a_tree_in_a_row_by_hand() -> None:
    # Row 0: 5 6 4 | 7 8 | 9, then the sequence 3 and one token of filler.
    chosen = as_batch([[5, 6, 4], [5, 6, 7, 8], [5, 6, 7, 9], [3]])
    plan = Microbatch(rows=((0, 1, 2, 3),), row_length=8, shared=(0, 2, 3, 0))
    rows = pack(chosen["input_ids"], chosen["input_lengths"], plan)
    assert rows.input_ids.tolist() == [[5, 6, 4, 7, 8, 9, 3, 0]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 2, 3, 3, 0, 0]]
    assert rows.last.tolist() == [[5, 5, 2, 5, 4, 5, 6, 7]]
    assert rows.column[:, :4].tolist() == [[0, 1, 2, 0], [0, 1, 3, 4], [0, 1, 3, 5], [6, 0, 0, 0]]
    seen = packed_causal_mask(rows.last, None)[0, 0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]


def attended(batch: BatchedDataDict, part: Microbatch, index: int) -> list[list[int]]:
    """Returns the tokens that each token of a sequence attends to, in the order of the row."""
    chosen = batch.select_indices(part.indices)
    rows = pack(chosen["input_ids"], chosen["input_lengths"], part)
    mask = packed_causal_mask(rows.last, None)[:, 0]
    position = part.indices.index(index)
    length = int(chosen["input_lengths"][position])
    row, columns = int(rows.row[position, 0]), rows.column[position, :length]
    assert rows.position_ids[row, columns].tolist() == list(range(length))
    return [rows.input_ids[row][mask[row, column]].tolist() for column in columns]


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(SEQUENCES, st.sampled_from([0.0, 5.0, 50.0, 1e9]), st.integers(7, 60), st.booleans())
def test_every_token_attends_only_to_its_sequence(
    sequences: list[list[int]], pairs_per_token: float, max_tokens: int, is_paired: bool
) -> None:
    max_tokens = max(max_tokens, 14)
    pairs = [index // 2 for index in range(len(sequences))] if is_paired else None
    batch = as_batch(sequences, pairs)
    sharing = PrefixSharing(pairs_per_token=pairs_per_token)
    plan = plan_shard(batch, max_tokens=max_tokens, sharing=sharing)
    assert sorted(index for part in plan for index in part.indices) == list(range(len(sequences)))
    where = {index: number for number, part in enumerate(plan) for index in part.indices}
    assert not is_paired or all(where[i] == where[i - 1] for i in range(1, len(sequences), 2))
    for part in plan:
        assert len(part.rows) * part.row_length <= max_tokens
        for index in part.indices:
            sequence = sequences[index]
            expected = [sequence[: position + 1] for position in range(len(sequence))]
            assert attended(batch, part, index) == expected


@settings(deadline=None, max_examples=100)
@given(SEQUENCES, st.integers(1, 5))
def test_every_rank_gets_full_trees_and_the_same_number_of_microbatches(
    sequences: list[list[int]], num_ranks: int
) -> None:
    batch = as_batch(sequences)
    shards = shard_for_training(batch, num_ranks=num_ranks, max_tokens=20, sharing=FREE)
    assert sorted(shards.order) == list(range(len(sequences)))
    for shard in shards:
        for part in shard.microbatches or []:
            for position, index in enumerate(part.indices):
                sequence = shard["input_ids"][index, : int(shard["input_lengths"][index])].tolist()
                assert attended(shard, part, index)[-1] == sequence, position


def test_one_group_is_divided_over_the_ranks() -> None:
    prompt = list(range(40))
    batch = collate([[*prompt, 40 + n, 1, 2, 3] for n in range(8)], [[True] * 44] * 8)
    shards = shard_for_training(batch, num_ranks=4, max_tokens=400, sharing=FREE)
    assert [len(rows) for rows in shards.indices] == [2, 2, 2, 2]
    # Rows of 48 tokens for two sequences of 44, which share 40.
    assert all(part.shared == (0, 40) for shard in shards for part in shard.microbatches or [])


def test_equal_sequences_without_padding_share_all_their_tokens() -> None:
    ids = torch.tensor([[1, 2, 3], [1, 2, 3]])
    trees = prefix_trees(ids, torch.tensor([3, 3]), sharing=FREE, max_tokens=9)
    assert trees == [PrefixTree((0, 1), (0, 3), 3)]


@pytest.mark.parametrize(
    ("pairs_per_token", "num_trees"),
    [
        # Two sequences of 3 + 5 tokens: a row of 13 has 13² - 8² = 105 pairs more, a separate one
        # has 8² = 64 and 3 tokens.
        (14.0, 1),  # 64 + 3 * 14 = 106
        (13.0, 2),  # 64 + 3 * 13 = 103
    ],
)
def test_a_row_grows_while_the_tokens_it_saves_cost_more(
    pairs_per_token: float, num_trees: int
) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 9, 9, 9, 9]])
    sharing = PrefixSharing(pairs_per_token=pairs_per_token)
    trees = prefix_trees(ids, torch.tensor([8, 8]), sharing=sharing, max_tokens=99)
    assert len(trees) == num_trees


@pytest.mark.parametrize(("longest", "found"), [(4, [(0,), (1,), (2,)]), (5, [(2, 1, 0)])])
def test_nothing_is_shared_with_sequences_longer_than_a_window(
    longest: int, found: list[tuple[int, ...]]
) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 0, 0], [1, 2, 0, 0, 0]])
    sharing = PrefixSharing(pairs_per_token=1e9, longest=longest)
    trees = prefix_trees(ids, torch.tensor([5, 3, 2]), sharing=sharing, max_tokens=99)
    assert sorted(tree.indices for tree in trees) == found
