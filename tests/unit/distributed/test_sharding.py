"""Every row is in one shard and returns to its position."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import NO_SEQUENCES, Microbatch, pack, plan_microbatches
from nemo_rl_core.distributed.packing.ranks import Shards, shard_for_training

LENGTHS = st.lists(st.integers(1, 20), max_size=30)
NUM_SHARDS = st.integers(1, 9)


def make_batch(lengths: list[int], *, pairs: bool = False) -> BatchedDataDict:
    """Returns rows with distinct tokens; with `pairs`, two neighbors form a group."""
    ids = torch.zeros(len(lengths), 20, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(length) + 100 * (row + 1)
    batch = BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor(lengths).long()})
    if pairs:
        batch["pair_ids"] = torch.arange(len(lengths)) // 2
    return batch


def restored_rows(shards: Shards) -> list[list[int]]:
    """Restores the batch from ranks that return the ids of their shard."""
    results = [BatchedDataDict({"x": shard["input_ids"]}) for shard in shards]
    rows: list[list[int]] = shards.restored(results)["x"].tolist()
    return rows


@settings(deadline=None)
@given(LENGTHS, NUM_SHARDS, st.booleans(), st.booleans())
def test_shards_come_back(
    lengths: list[int], num_shards: int, share_rows: bool, pairs: bool
) -> None:
    batch = make_batch(lengths, pairs=pairs)
    shards = shard_for_training(batch, num_ranks=num_shards, max_tokens=64, share_rows=share_rows)
    assert len(shards) == num_shards
    assert restored_rows(shards) == batch["input_ids"].tolist()
    most = max(len(part.microbatches or []) for part in shards)
    for part in shards:
        plans = part.microbatches or []
        # Fewer than on other ranks only if nothing is left to split.
        assert len(plans) == most or all(len(plan.indices) <= 1 + pairs for plan in plans)
    for rows, part in zip(shards.indices, shards, strict=True):
        assert list(rows) == sorted(rows)
        assert part["input_lengths"].tolist() == [lengths[row] for row in rows]
        planned = [index for plan in part.microbatches or [] for index in plan.indices]
        assert sorted(planned) == list(range(part.size))
        parts = [(part.select_indices(plan.indices), plan) for plan in part.microbatches or []]
        for rows_of_part, plan in parts:
            assert len(plan.rows) * plan.row_length <= 64
            # Every row fits at its planned position.
            packed = pack(rows_of_part["input_ids"], rows_of_part["input_lengths"], plan)
            assert int((packed.input_ids > 0).sum()) == int(rows_of_part["input_lengths"].sum())
        if pairs:
            homes = [set(rows_of_part["pair_ids"].tolist()) for rows_of_part, _ in parts]
            assert sum(len(home) for home in homes) == len(set(part["pair_ids"].tolist()))
    if pairs:
        kept = [set(part["pair_ids"].tolist()) for part in shards]
        assert sum(len(ids) for ids in kept) == len(set(batch["pair_ids"].tolist()))


@settings(deadline=None)
@given(LENGTHS, st.booleans())
def test_one_rank_gets_the_unchanged_batch(lengths: list[int], pairs: bool) -> None:
    batch = make_batch(lengths, pairs=pairs)
    (single,) = shard_for_training(batch, num_ranks=1, max_tokens=64)
    assert torch.equal(single["input_ids"], batch["input_ids"])
    bundles = batch["pair_ids"].tolist() if pairs else None
    assert single.microbatches == plan_microbatches(lengths, max_tokens=64, bundles=bundles)


def test_ranks_past_the_rows_get_none() -> None:
    shards = shard_for_training(make_batch([3, 2]), num_ranks=3, max_tokens=8)
    assert shards.indices == ((0,), (1,), ())
    assert [part.microbatches for part in shards] == [
        [Microbatch(((0,),), 3)],
        [Microbatch(((0,),), 2)],
        [],
    ]
    assert shards[2]["input_ids"].shape == (0, 20)


def test_filler_does_not_represent_a_sequence() -> None:
    # A backend without rows to compute uses one token of filler.
    empty = make_batch([3]).select_indices([])
    rows = pack(empty["input_ids"], empty["input_lengths"], NO_SEQUENCES)
    assert rows.input_ids.tolist() == [[0]]
    assert rows.position_ids.tolist() == [[0]]
    assert rows.row.shape == (0, 20)


def test_results_of_other_width_are_padded_when_restored() -> None:
    shards = shard_for_training(make_batch([4, 3, 2, 1]), num_ranks=2, max_tokens=8)
    assert shards.order == [0, 1, 3, 2]
    wide = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0], [8, 0, 0, 0]])
    results = [
        BatchedDataDict({"x": wide, "name": ["a", "b", "d"]}),
        BatchedDataDict({"x": torch.tensor([[9, 10]]), "name": ["c"]}),
    ]
    restored = shards.restored(results)
    assert restored["x"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 0], [9, 10, 0, 0], [8, 0, 0, 0]]
    assert restored["name"] == ["a", "b", "c", "d"]
