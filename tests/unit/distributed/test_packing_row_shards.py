"""Sharding of sequences by their lengths."""

import numpy as np
import pytest
import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.ranks import sequence_flops
from nemo_rl_core.distributed.packing.row_shards import (
    ShardedRows,
    assign,
    assign_nearby,
    shard_rows,
)


def test_items_go_in_turns_then_to_the_cheapest_share() -> None:
    """20 items, 2 shares: the 4 costliest in turns (0 1 1 0), the others to the cheapest share."""
    costs = np.array([100, 90, 80, 70, *[1] * 16])
    owners = assign(costs, 2).tolist()
    assert owners[:4] == [0, 1, 1, 0]
    totals = [
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == share)
        for share in (0, 1)
    ]
    assert totals == [178, 178]


def test_more_shares_than_items() -> None:
    assert assign(np.array([5, 7]), 4).tolist() == [1, 0]
    assert assign(np.array([], np.int64), 3).tolist() == []


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_shares_of_many_are_nearly_even(num_ranks: int) -> None:
    lengths = np.random.default_rng(0).integers(512, 4096, 64 * num_ranks)
    costs = np.array([sequence_flops(int(length)) for length in lengths])
    totals = np.bincount(assign(costs, num_ranks), costs)
    assert totals.max() < 1.005 * totals.mean()


def test_runs_of_equal_cost_go_to_neighboring_ranks() -> None:
    """The first 8 of 16 ranks get the first half of 1,024 rows by cost."""
    costs = np.random.default_rng(0).integers(1, 100, 1024)
    owners = assign_nearby(costs, 16)
    machine = owners // 8
    assert (np.diff(machine) >= 0).all()
    totals = np.bincount(owners, costs)
    assert len(totals) == 16
    assert totals.max() < 1.02 * totals.mean()


def test_the_last_machine_may_have_fewer_ranks() -> None:
    totals = np.bincount(assign_nearby(np.ones(1100, np.int64), 11))
    assert totals.tolist() == [100] * 11


def batch(lengths: list[int], groups: list[int]) -> BatchedDataDict:
    return BatchedDataDict(
        {"input_lengths": torch.tensor(lengths), "group_ids": torch.tensor(groups)}
    )


def rows_of(sharded: ShardedRows) -> list[list[int]]:
    """Returns the `group_ids` of each rank."""
    return [part["group_ids"].tolist() for block in sharded.parts for part in block]


@pytest.mark.parametrize("num_ranks", [1, 3, 11])
def test_ranks_have_every_row_once_in_order(num_ranks: int) -> None:
    lengths = np.random.default_rng(0).integers(2, 90, 50).tolist()
    sharded = shard_rows(batch(lengths, list(range(50))), num_ranks=num_ranks)
    result = rows_of(sharded)
    assert [len(rows) for rows in result] == sharded.sizes.tolist()
    assert [row for rows in result for row in rows] == sharded.order.tolist()
    assert sorted(sharded.order.tolist()) == list(range(50))
    assert all(rows == sorted(rows) for rows in result)
    assert [len(block) for block in sharded.parts] == {1: [1], 3: [3], 11: [8, 3]}[num_ranks]


def test_groups_are_kept_together() -> None:
    groups = [7, 3] * 6 + [5] * 4
    sharded = shard_rows(batch(list(range(2, 18)), groups), num_ranks=2, keep_groups=True)
    homes = [set(rows) for rows in rows_of(sharded)]
    assert homes[0].isdisjoint(homes[1])
    assert homes[0] | homes[1] == {3, 5, 7}


def test_rank_beyond_the_rows_gets_no_rows() -> None:
    assert rows_of(shard_rows(batch([4], [0]), num_ranks=2)) == [[0], []]
