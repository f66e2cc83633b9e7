"""Remote rows are selected and joined without being read."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_core.distributed.batched_data_dict import (
    BatchedDataDict,
    InProcess,
    RemoteRows,
    as_block,
    from_block,
    read_blocks,
)

FIRST = InProcess(
    as_block(
        {
            "input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]),
            "token_mask": torch.tensor([[False, True], [True, False]]),
            "texts": ["one", "two"],
        }
    )
)
SECOND = InProcess(
    as_block(
        {
            "input_ids": torch.tensor([[6, 7, 8, 9]]),
            "token_mask": torch.tensor([[True, True, True]]),
            "texts": ["three"],
        }
    )
)


def rows() -> RemoteRows:
    return RemoteRows.of_blocks([FIRST, SECOND], [2, 1])


class Unreadable:
    """A reference that cannot be resolved."""


def test_rows_of_several_blocks_are_padded_to_the_widest() -> None:
    fetched = rows()[np.array([2, 1])].fetched()
    assert fetched["input_ids"].tolist() == [[6, 7, 8, 9], [4, 5, 0, 0]]
    assert fetched["token_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert fetched["texts"] == ["three", "two"]


def test_a_column_that_some_blocks_lack_is_left_out() -> None:
    with_versions = {"input_ids": np.array([[0]]), "weight_versions": np.array([[7]])}
    remote = RemoteRows.of_blocks([InProcess(with_versions), FIRST], [1, 2])
    assert list(remote.fetched()) == ["input_ids"]


def test_a_slice_reads_only_blocks_that_it_needs() -> None:
    remote = RemoteRows.of_blocks([FIRST, Unreadable()], [2, 7])[1:2]
    assert remote.fetched()["input_ids"].tolist() == [[4, 5, 0]]
    assert remote.compact().references == (FIRST,)


def test_no_rows_still_have_columns() -> None:
    fetched = rows()[0:0].fetched()
    assert fetched["input_ids"].shape == (0, 3)
    assert fetched["texts"] == []


def test_parts_are_joined_in_order() -> None:
    joined = RemoteRows.concatenated([rows()[1:3], rows()[0:1]])
    assert joined.of_column("texts").fetched() == {"texts": ["two", "three", "one"]}


def test_results_of_ranks_are_restored_in_order() -> None:
    """Rank 0 has computed rows 0 and 2, rank 1 row 1."""
    assert rows().reordered([0, 2, 1]).fetched()["texts"] == ["one", "three", "two"]


def test_sent_blocks_exclude_unneeded_ones() -> None:
    sent = copy.copy(rows()[0:2])  # the same as pickling
    assert len(sent.references) == 1
    assert sent.fetched()["texts"] == ["one", "two"]


def test_values_of_a_block_are_not_changed_by_its_readers() -> None:
    fetched = rows()[0:1].fetched()
    fetched["input_ids"][0, 0] = 99
    from_block(FIRST.block)["input_ids"][0, 0] = 99
    assert read_blocks([FIRST])[0]["input_ids"][0, 0] == 1


def batch() -> BatchedDataDict:
    scores = InProcess({"logprobs": np.array([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]], np.float32)})
    return BatchedDataDict(
        {
            "tokens": rows()[np.array([0, 1])],
            "prev_logprobs": RemoteRows.of_blocks([scores], [2]).of_column("logprobs"),
            "input_lengths": torch.tensor([3, 2]),
        }
    )


def test_a_batch_is_as_wide_as_its_longest_row() -> None:
    fetched = batch().fetched()
    assert set(fetched) == {"input_ids", "token_mask", "texts", "prev_logprobs", "input_lengths"}
    assert fetched["prev_logprobs"].tolist() == [[-1.0, -2.0], [-4.0, 0.0]]
    shorter = batch().select_indices([1]).fetched()
    assert shorter["input_ids"].tolist() == [[4, 5]]
    assert shorter["token_mask"].tolist() == [[True]]
    assert shorter["prev_logprobs"].tolist() == [[-4.0]]


def test_a_narrow_block_is_padded() -> None:
    narrow = InProcess({"logprobs": np.array([[-1.0], [-4.0]], np.float32)})
    remote = batch()
    remote["prev_logprobs"] = RemoteRows.of_blocks([narrow], [2]).of_column("logprobs")
    assert remote.fetched()["prev_logprobs"].tolist() == [[-1.0, 0.0], [-4.0, 0.0]]


def test_a_batch_counts_remote_rows_as_a_column() -> None:
    assert batch().size == 2
    assert batch().is_remote
    assert not batch().fetched().is_remote
    assert batch().slice(0, 1).size == 1


def test_a_batch_with_all_its_values_is_fetched_as_it_is() -> None:
    plain = BatchedDataDict({"x": torch.ones(2)})
    assert plain.fetched() is plain


@pytest.mark.parametrize("value", [torch.ones(2, dtype=torch.bool), ["a", "b"]])
def test_blocks_have_arrays_or_lists(value: Any) -> None:
    (column,) = as_block({"x": value}).values()
    assert isinstance(column, np.ndarray) == isinstance(value, torch.Tensor)
    (back,) = from_block({"x": column}).values()
    assert type(back) is type(value)
    assert list(back) == list(value)
