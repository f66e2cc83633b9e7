"""Packed tokens of a micro-batch, in full rows and in parts of rows."""

from typing import Any, cast

import pytest
import torch

from nemo_rl_core.backends.training.dtensor import microbatches as module
from nemo_rl_core.backends.training.dtensor.microbatches import packed_tokens
from nemo_rl_core.backends.training.padded import target_positions
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.packing.plan import Microbatch

PLAN = Microbatch(rows=((0,), (1,), (2, 3)), row_length=8)


def make_batch() -> BatchedDataDict:
    rows = [
        [10 * row + index for index in range(length)] for row, length in enumerate((8, 7, 3, 4))
    ]
    return collate(rows, [[index >= len(row) // 2 for index in range(len(row))] for row in rows])


def test_selected_tokens_are_in_the_rows() -> None:
    batch = make_batch()
    actual = packed_tokens(batch, PLAN, target_positions(batch), with_boundaries=True)
    assert torch.equal(
        actual.input_ids[actual.row, actual.column], batch["input_ids"][actual.selected]
    )
    assert actual.input_ids.tolist()[2] == [20, 21, 22, 30, 31, 32, 33, 0]
    # The filler at a row's end is a separate sequence.
    assert actual.boundaries is not None
    assert actual.boundaries.tolist() == [0, 8, 15, 16, 19, 23, 24]
    assert actual.longest == 8
    assert not actual.is_tree


def test_context_ranks_have_every_selected_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    full = packed_tokens(batch, PLAN, target_positions(batch))
    assert full.local is None
    hidden = torch.arange(24).view(3, 8)
    expected = hidden[full.row, full.column]
    actual = torch.full_like(expected, -1)
    for rank in (0, 1):

        def half(values: torch.Tensor, _: Any, *, dim: int, rank: int = rank) -> torch.Tensor:
            return values.chunk(2, dim)[rank]

        monkeypatch.setattr(module, "rank_part", half)
        part = packed_tokens(batch, PLAN, target_positions(batch), group=cast("Any", "both"))
        assert part.local is not None
        assert (actual[part.local] == -1).all()
        actual[part.local] = hidden.chunk(2, 1)[rank][part.row, part.column]
    assert torch.equal(actual, expected)
