"""Batches keep one row per sequence in all operations."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import Microbatch


def make_batch() -> BatchedDataDict:
    return BatchedDataDict({"ids": torch.tensor([[1, 2], [3, 4], [5, 6]]), "name": ["a", "b", "c"]})


def test_rows_are_selected_in_the_requested_order() -> None:
    picked = make_batch().select_indices([2, 0, 2])
    assert picked["ids"].tolist() == [[5, 6], [1, 2], [5, 6]]
    assert picked["name"] == ["c", "a", "c"]
    assert isinstance(picked, BatchedDataDict)


def test_picking_nothing_leaves_the_columns() -> None:
    picked = make_batch().select_indices([])
    assert picked["ids"].shape == (0, 2)
    assert picked["name"] == []


def test_a_slice_leaves_out_its_end() -> None:
    part = make_batch().slice(1, 3)
    assert part["ids"].tolist() == [[3, 4], [5, 6]]
    assert part["name"] == ["b", "c"]


def test_joining_pads_on_the_right_with_each_columns_value() -> None:
    short = BatchedDataDict(
        {"ids": torch.tensor([[1, 2]]), "mask": torch.tensor([[True]]), "length": torch.tensor([2])}
    )
    long = BatchedDataDict(
        {
            "ids": torch.tensor([[3, 4, 5]]),
            "mask": torch.tensor([[True, True]]),
            "length": torch.tensor([3]),
        }
    )
    joined = BatchedDataDict.from_batches([short, long], pad_values={"ids": 9})
    assert joined["ids"].tolist() == [[1, 2, 9], [3, 4, 5]]
    assert joined["mask"].tolist() == [[True, False], [True, True]]
    assert joined["mask"].dtype == torch.bool
    assert joined["length"].tolist() == [2, 3]


def test_joining_pads_every_dimension() -> None:
    small, large = torch.ones(1, 1, 2), torch.full((2, 2, 1), 5)
    joined = BatchedDataDict.from_batches([{"x": small}, {"x": large}], pad_values={"x": -1})
    assert joined["x"].tolist() == [[[1, 1], [-1, -1]], [[5, -1], [5, -1]], [[5, -1], [5, -1]]]


def test_mismatched_batches_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="dimensions"):
        BatchedDataDict.from_batches([{"x": torch.zeros(1)}, {"x": torch.zeros(1, 2)}])
    with pytest.raises(ValueError, match=r"same columns, got \[\['x'\], \['x', 'y'\]\]"):
        BatchedDataDict.from_batches([{"x": [1]}, {"x": [1], "y": [2]}])
    assert dict(BatchedDataDict.from_batches([])) == {}


def test_the_size_is_the_length_of_every_column() -> None:
    assert make_batch().size == 3
    assert BatchedDataDict().size == 0
    with pytest.raises(ValueError, match=r"\{'a': 1, 'b': 2\}"):
        _ = BatchedDataDict({"a": [0], "b": [0, 0]}).size


def test_move_does_not_change_lists() -> None:
    moved = make_batch().to("cpu")
    assert moved["name"] == ["a", "b", "c"]
    assert moved["ids"].device.type == "cpu"


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12))
def test_slices_join_to_the_full_batch(num_rows: int, step: int) -> None:
    full = BatchedDataDict(
        {"x": torch.arange(2 * num_rows).view(num_rows, 2), "n": [*range(num_rows)]}
    )
    parts = [full.slice(start, start + step) for start in range(0, num_rows, step)]
    joined = BatchedDataDict.from_batches(parts)
    assert torch.equal(joined["x"], full["x"])
    assert joined["n"] == full["n"]


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(1, 15))
def test_chunks_join_to_the_batch_and_zero_chunks_are_refused(num_rows: int, chunks: int) -> None:
    full = BatchedDataDict({"x": torch.arange(num_rows), "n": [*range(num_rows)]})
    parts = [full.chunk(rank, chunks) for rank in range(chunks)]
    assert BatchedDataDict.from_batches(parts)["n"] == full["n"]
    assert torch.equal(BatchedDataDict.from_batches(parts)["x"], full["x"])
    assert max(part.size for part in parts) - min(part.size for part in parts) <= 1
    for rank in (-1, chunks):
        with pytest.raises(ValueError, match=f"0 to {chunks - 1}, got {rank}"):
            full.chunk(rank, chunks)


@settings(deadline=None)
@given(st.permutations(range(7)))
def test_reordering_undoes_a_selection(order: list[int]) -> None:
    full = BatchedDataDict({"x": torch.arange(14).view(7, 2), "n": [*"abcdefg"]})
    restored = full.select_indices(order).reorder_data(order)
    assert torch.equal(restored["x"], full["x"])
    assert restored["n"] == full["n"]


def test_reordering_by_hand() -> None:
    # Row 0 moves to index 2, row 1 to index 0, row 2 to index 1.
    assert make_batch().reorder_data([2, 0, 1])["name"] == ["b", "c", "a"]
    for wrong in ([0, 1], [0, 0, 1], [0, 1, 3]):
        with pytest.raises(ValueError, match="permutation of 3 rows"):
            make_batch().reorder_data(wrong)


def test_plan_is_kept_until_rows_change() -> None:
    batch = make_batch()
    batch.microbatches = [Microbatch(((0, 2),), 4), Microbatch(((1,),), 2)]
    kept = [pickle.loads(pickle.dumps(batch)), batch.to("cpu"), batch.copy(), copy.copy(batch)]  # noqa: S301
    for same in [*kept, copy.deepcopy(batch)]:
        assert same.microbatches == batch.microbatches
        assert same["name"] == batch["name"]
    changed = [batch.slice(0, 3), batch.select_indices([0, 1, 2]), batch.chunk(0, 1)]
    changed += [batch.reorder_data([0, 1, 2]), BatchedDataDict.from_batches([batch])]
    for other in changed:
        assert other.microbatches is None
    assert make_batch().microbatches is None
