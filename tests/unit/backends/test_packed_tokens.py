"""The tokens of a micro-batch as the decoder reads them, whole and in parts of rows."""

from typing import Any, cast

import pytest
import torch

from nemo_rl_core.backends.training.dtensor import packed_tokens as module
from nemo_rl_core.backends.training.dtensor.packed_tokens import packed_tokens
from nemo_rl_core.backends.training.padded import wanted_positions
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.packing.plan import Microbatch

PLAN = Microbatch(rows=((0,), (1,), (2, 3)), row_length=8)


def make_batch() -> BatchedDataDict:
    rows = [
        [10 * row + place for place in range(length)] for row, length in enumerate((8, 7, 3, 4))
    ]
    return collate(rows, [[place >= len(row) // 2 for place in range(len(row))] for row in rows])


def test_wanted_tokens_are_found_in_the_rows() -> None:
    batch = make_batch()
    found = packed_tokens(batch, PLAN, wanted_positions(batch), with_boundaries=True)
    assert torch.equal(found.input_ids[found.row, found.column], batch["input_ids"][found.wanted])
    assert found.input_ids.tolist()[2] == [20, 21, 22, 30, 31, 32, 33, 0]
    # The filler at a row's end is a sequence of its own.
    assert found.boundaries is not None
    assert found.boundaries.tolist() == [0, 8, 15, 16, 19, 23, 24]
    assert found.longest == 8
    assert not found.is_tree


def test_context_ranks_have_every_wanted_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    whole = packed_tokens(batch, PLAN, wanted_positions(batch))
    assert whole.own is None
    hidden = torch.arange(24).view(3, 8)
    expected = hidden[whole.row, whole.column]
    found = torch.full_like(expected, -1)
    for rank in (0, 1):

        def half(values: torch.Tensor, _: Any, *, dim: int, rank: int = rank) -> torch.Tensor:
            return values.chunk(2, dim)[rank]

        monkeypatch.setattr(module, "own_part", half)
        part = packed_tokens(batch, PLAN, wanted_positions(batch), group=cast("Any", "both"))
        assert part.own is not None
        assert (found[part.own] == -1).all()
        found[part.own] = hidden.chunk(2, 1)[rank][part.row, part.column]
    assert torch.equal(found, expected)
