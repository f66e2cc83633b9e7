"""Shards: every row in one of them, and back where it was."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.data.packing import pack
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.microbatches import (
    NO_SEQUENCES,
    Microbatch,
    plan_microbatches,
)
from nemo_rl_core.distributed.packing.settings import DynamicBatching, SequencePacking
from nemo_rl_core.distributed.sharding import Shards, shard_for_training
from nemo_rl_core.errors import DataError

LENGTHS = st.lists(st.integers(1, 20), max_size=30)
NUM_SHARDS = st.integers(1, 9)
BUDGETS: list[DynamicBatching | SequencePacking] = [
    DynamicBatching(64),
    DynamicBatching(64, sequence_length_round=8),
    SequencePacking(64),
    SequencePacking(64, "modified_first_fit_decreasing", sequence_length_pad_multiple=4),
]


def make_batch(lengths: list[int], *, pairs: bool = False) -> BatchedDataDict:
    """Rows whose tokens tell them apart; with `pairs`, each two neighbours belong together."""
    ids = torch.zeros(len(lengths), 20, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(length) + 100 * (row + 1)
    batch = BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor(lengths).long()})
    if pairs:
        batch["pair_ids"] = torch.arange(len(lengths)) // 2
    return batch


def restored_rows(shards: Shards) -> list[list[int]]:
    """What comes back when each rank returns the ids that it was given."""
    results = [BatchedDataDict({"x": shard["input_ids"]}) for shard in shards]
    rows: list[list[int]] = shards.restored(results)["x"].tolist()
    return rows


@settings(deadline=None)
@given(LENGTHS, NUM_SHARDS, st.none() | st.integers(1, 12))
def test_uneven_shards_come_back(
    lengths: list[int], num_shards: int, batch_size: int | None
) -> None:
    batch = make_batch(lengths)
    shards = batch.shard_by_batch_size(num_shards, batch_size, allow_uneven_shards=True)
    assert len(shards) == num_shards
    assert restored_rows(shards) == batch["input_ids"].tolist()
    for rank in range(num_shards):
        assert shards[rank]["input_ids"].shape == (len(shards.indices[rank]), 20)
        assert shards[rank].microbatches is None
    if batch_size is None:
        parts = [
            batch.chunk(rank, num_shards)["input_lengths"].tolist() for rank in range(num_shards)
        ]
        assert [shard["input_lengths"].tolist() for shard in shards] == parts


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 4))
def test_even_shards_come_back(num_shards: int, each: int, num_batches: int) -> None:
    batch = make_batch([1 + row % 20 for row in range(num_shards * each * num_batches)])
    shards = batch.shard_by_batch_size(num_shards, num_shards * each)
    assert restored_rows(shards) == batch["input_ids"].tolist()
    # The n-th batch of a shard is its part of the n-th batch of all.
    for number in range(num_batches):
        whole = batch.get_batch(number, num_shards * each)
        for rank, shard in enumerate(shards):
            part = shard.get_batch(number, each)["input_ids"]
            assert torch.equal(part, whole.chunk(rank, num_shards)["input_ids"])


def test_rows_that_do_not_divide_are_refused_unless_allowed() -> None:
    batch = make_batch([1, 2, 3, 4, 5, 6])
    for num_shards, batch_size in ((4, None), (2, 4), (2, 3)):
        with pytest.raises(ValueError, match="allow_uneven_shards"):
            batch.shard_by_batch_size(num_shards, batch_size)
        assert (
            len(batch.shard_by_batch_size(num_shards, batch_size, allow_uneven_shards=True))
            == num_shards
        )
    assert batch.shard_by_batch_size(2, 2).indices == ((0, 2, 4), (1, 3, 5))
    for wrong in ({"shards": 0}, {"shards": 2, "batch_size": 0}):
        with pytest.raises(ValueError, match="at least 1, got 0"):
            batch.shard_by_batch_size(**wrong)


def shard(batch: BatchedDataDict, num_shards: int, how: Any) -> Shards:
    if isinstance(how, DynamicBatching):
        return batch.shard_by_batch_size(num_shards, dynamic_batching_args=how)
    if isinstance(how, SequencePacking):
        return batch.shard_by_batch_size(num_shards, sequence_packing_args=how)
    return shard_for_training(batch, num_ranks=num_shards, max_tokens=64, share_rows=how)


@settings(deadline=None)
@given(LENGTHS, NUM_SHARDS, st.sampled_from([*BUDGETS, True, False]), st.booleans())
def test_planned_shards_come_back(
    lengths: list[int], num_shards: int, how: Any, pairs: bool
) -> None:
    batch = make_batch(lengths, pairs=pairs)
    shards = shard(batch, num_shards, how)
    assert len(shards) == num_shards
    assert restored_rows(shards) == batch["input_ids"].tolist()
    most = max(len(part.microbatches or []) for part in shards)
    for part in shards:
        plans = part.microbatches or []
        # Fewer than on other ranks only where nothing is left to split.
        assert len(plans) == most or all(len(plan.indices) <= 1 + pairs for plan in plans)
    for rows, part in zip(shards.indices, shards, strict=True):
        assert list(rows) == sorted(rows)
        assert part["input_lengths"].tolist() == [lengths[row] for row in rows]
        planned = [index for plan in part.microbatches or [] for index in plan.indices]
        assert sorted(planned) == list(range(part.size))
        for rows_of_part, plan in part.make_planned_microbatch_iterator():
            assert len(plan.rows) * plan.row_length <= 64
            # Every row fits where the plan puts it.
            packed = pack(rows_of_part["input_ids"], rows_of_part["input_lengths"], plan)
            assert int((packed.input_ids > 0).sum()) == int(rows_of_part["input_lengths"].sum())
        if pairs:
            homes = [
                set(ids["pair_ids"].tolist()) for ids, _ in part.make_planned_microbatch_iterator()
            ]
            assert sum(len(home) for home in homes) == len(set(part["pair_ids"].tolist()))
    if pairs:
        kept = [set(part["pair_ids"].tolist()) for part in shards]
        assert sum(len(ids) for ids in kept) == len(set(batch["pair_ids"].tolist()))


@settings(deadline=None)
@given(LENGTHS, st.booleans())
def test_one_rank_gets_the_batch_as_it_was(lengths: list[int], pairs: bool) -> None:
    batch = make_batch(lengths, pairs=pairs)
    (alone,) = shard_for_training(batch, num_ranks=1, max_tokens=64)
    assert torch.equal(alone["input_ids"], batch["input_ids"])
    bundles = batch["pair_ids"].tolist() if pairs else None
    assert alone.microbatches == plan_microbatches(lengths, max_tokens=64, bundles=bundles)


def test_ranks_past_the_rows_get_none() -> None:
    shards = shard_for_training(make_batch([3, 2]), num_ranks=3, max_tokens=8)
    assert shards.indices == ((0,), (1,), ())
    assert [part.microbatches for part in shards] == [
        [Microbatch(((0,),), 3)],
        [Microbatch(((0,),), 2)],
        [],
    ]
    assert shards[2]["input_ids"].shape == (0, 20)


def test_filler_stands_for_no_sequence() -> None:
    # A backend that has nothing to compute lays out one token of filler.
    empty = make_batch([3]).select_indices([])
    rows = pack(empty["input_ids"], empty["input_lengths"], NO_SEQUENCES)
    assert rows.input_ids.tolist() == [[0]]
    assert rows.position_ids.tolist() == [[0]]
    assert rows.row.shape == (0, 20)


def test_results_of_other_width_are_padded_when_put_back() -> None:
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


def test_batching_rounds_rows_and_packing_sums_them() -> None:
    batch = make_batch([5, 4, 3, 2])
    (rounded,) = batch.shard_by_batch_size(1, dynamic_batching_args=DynamicBatching(16, 4))
    # Lengths count as 8, 4, 4, 4: 8 alone with one of 4 in rows of 8; then two rows of 4.
    assert rounded.microbatches == [Microbatch(((0,), (1,)), 8), Microbatch(((2,), (3,)), 4)]
    (packed,) = batch.shard_by_batch_size(1, sequence_packing_args=SequencePacking(8))
    assert packed.microbatches == [Microbatch(((0, 2),), 8), Microbatch(((1, 3),), 6)]


def test_settings_may_be_mappings_with_the_fields_names() -> None:
    batch = make_batch([5, 4, 3, 2])
    dynamic = {
        "max_tokens_per_microbatch": 16,
        "sequence_length_round": 4,
        "input_key": "input_ids",
    }
    given_so = batch.shard_by_batch_size(2, dynamic_batching_args=dynamic)
    record = batch.shard_by_batch_size(2, dynamic_batching_args=DynamicBatching(16, 4))
    assert [part.microbatches for part in given_so] == [part.microbatches for part in record]
    for wrong in ({"max_tokens": 16}, {"max_tokens_per_microbatch": 16, "algorthm": "x"}, {}):
        with pytest.raises(ValueError, match="SequencePacking needs max_tokens_per_microbatch"):
            batch.shard_by_batch_size(2, sequence_packing_args=wrong)


def test_contradictions_are_refused() -> None:
    batch = make_batch([5, 4, 3, 2])
    dynamic, packing = DynamicBatching(16), SequencePacking(16)
    with pytest.raises(ValueError, match="got both"):
        batch.shard_by_batch_size(2, dynamic_batching_args=dynamic, sequence_packing_args=packing)
    with pytest.raises(ValueError, match="get_batch"):
        batch.shard_by_batch_size(2, 2, dynamic_batching_args=dynamic)
    with pytest.raises(DataError, match="5 tokens does not fit"):
        batch.shard_by_batch_size(2, sequence_packing_args=SequencePacking(4))
