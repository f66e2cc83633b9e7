"""Batches: one row a sequence, whatever is done to them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict


def make_batch() -> BatchedDataDict:
    return BatchedDataDict({"ids": torch.tensor([[1, 2], [3, 4], [5, 6]]), "name": ["a", "b", "c"]})


def test_rows_are_picked_in_the_order_asked_for() -> None:
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


def test_three_dimensions_cannot_be_padded() -> None:
    narrow, wide = (BatchedDataDict({"x": torch.zeros(1, width, 2)}) for width in (1, 2))
    with pytest.raises(ValueError, match="padded"):
        BatchedDataDict.from_batches([narrow, wide])
    assert BatchedDataDict.from_batches([wide, wide])["x"].shape == (2, 2, 2)


def test_the_size_is_that_of_every_column() -> None:
    assert make_batch().size == 3
    assert BatchedDataDict().size == 0
    with pytest.raises(ValueError, match=r"\{'a': 1, 'b': 2\}"):
        _ = BatchedDataDict({"a": [0], "b": [0, 0]}).size


def test_a_move_leaves_lists_alone() -> None:
    moved = make_batch().to("cpu")
    assert moved["name"] == ["a", "b", "c"]
    assert moved["ids"].device.type == "cpu"


@given(st.integers(1, 12), st.integers(1, 12))
def test_slices_join_to_the_whole(num_rows: int, step: int) -> None:
    whole = BatchedDataDict(
        {"x": torch.arange(2 * num_rows).view(num_rows, 2), "n": [*range(num_rows)]}
    )
    parts = [whole.slice(start, start + step) for start in range(0, num_rows, step)]
    joined = BatchedDataDict.from_batches(parts)
    assert torch.equal(joined["x"], whole["x"])
    assert joined["n"] == whole["n"]
