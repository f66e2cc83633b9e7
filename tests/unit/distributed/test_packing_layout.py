"""The layout of planned micro-batches: every token in its row, with its position."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.distributed.packing.plan import Microbatch, PackedRows, pack, plan_microbatches

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def test_tokens_and_positions_by_hand() -> None:
    # Row 0 holds one sequence of 4; row 1 holds one of 2, one of 1, and filler in its last column.
    ids = torch.tensor([[11, 12, 13, 14], [21, 22, 0, 0], [31, 0, 0, 0]])
    rows = pack(ids, torch.tensor([4, 2, 1]), Microbatch(rows=((0,), (1, 2)), row_length=4))
    assert rows.input_ids.tolist() == [[11, 12, 13, 14], [21, 22, 31, 0]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert rows.last.tolist() == [[3, 3, 3, 3], [1, 1, 2, 3]]
    assert rows.row.tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert rows.column.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0], [2, 0, 0, 0]]


def test_filler_is_a_separate_sequence() -> None:
    # Two tokens, then three of filler whose positions restart at 0 and count on.
    rows = pack(
        torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]),
        torch.tensor([5, 2]),
        Microbatch(rows=((0,), (1,)), row_length=5),
    )
    assert rows.input_ids[1].tolist() == [6, 7, 0, 0, 0]
    assert rows.position_ids[1].tolist() == [0, 1, 0, 1, 2]


@settings(deadline=None)
@given(LENGTHS, st.integers(40, 200))
def test_every_token_has_its_row_and_column(lengths: list[int], max_tokens: int) -> None:
    for part in plan_microbatches(lengths, max_tokens=max_tokens):
        wide = max(lengths)
        ids, counts = _numbered([lengths[index] for index in part.indices], wide)
        rows = pack(ids, counts, part)
        valid = torch.arange(wide) < counts[:, None]
        assert torch.equal(rows.input_ids[rows.row, rows.column][valid], ids[valid])
        positions = torch.arange(wide).expand_as(ids)
        assert torch.equal(rows.position_ids[rows.row, rows.column][valid], positions[valid])
        assert int((rows.input_ids > 0).sum()) == sum(counts.tolist())
        assert _num_restarts(rows) == len(part.indices) + _num_rows_with_filler(rows)


def _numbered(lengths: list[int], wide: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences whose tokens are numbered 1, 2, 3, ..., so that each token is unique."""
    ids, first = torch.zeros(len(lengths), wide, dtype=torch.long), 1
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(first, first + length)
        first += length
    return ids, torch.tensor(lengths)


def _num_restarts(rows: PackedRows) -> int:
    return int((rows.position_ids == 0).sum())


def _num_rows_with_filler(rows: PackedRows) -> int:
    return int((rows.input_ids == 0).any(dim=1).sum())
