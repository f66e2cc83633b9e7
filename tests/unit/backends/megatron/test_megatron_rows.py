"""The part of packed rows that a context rank of `megatron` has, without ranks and kernels."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_core.backends.training.megatron import rows as module
from nemo_rl_core.backends.training.megatron.rows import MegatronRows, megatron_rows
from nemo_rl_core.backends.training.padded import target_positions
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.packing.plan import Microbatch, pack

PLAN = Microbatch(rows=((0,), (1,), (2, 3)), row_length=8)


def make_batch() -> BatchedDataDict:
    lengths = (8, 7, 3, 4)
    rows = [[10 * row + index for index in range(n)] for row, n in enumerate(lengths)]
    return collate(rows, [[index >= len(row) // 2 for index in range(len(row))] for row in rows])


def rows_of_rank(
    rank: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch, *, is_ring: bool
) -> MegatronRows:
    group = SimpleNamespace(size=lambda: num_ranks, rank=lambda: rank)
    state = SimpleNamespace(
        get_context_parallel_group=lambda: group,
        get_tensor_model_parallel_world_size=lambda: 1,
    )

    def part(values: torch.Tensor, _: Any, *, dim: int) -> torch.Tensor:
        return values.chunk(num_ranks, dim)[rank]

    monkeypatch.setattr(module, "parallel_state", state)
    monkeypatch.setattr(module, "rank_part", part)
    monkeypatch.setattr(module, "has_transformer_engine", lambda: is_ring)
    batch = make_batch()
    packed = pack(batch["input_ids"], batch["input_lengths"], PLAN)
    return megatron_rows(packed, target_positions(batch))


@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_selected_token_is_on_one_rank_with_its_id(
    num_ranks: int, is_ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch()
    actual = None
    for rank in range(num_ranks):
        rows = rows_of_rank(rank, num_ranks, monkeypatch, is_ring=is_ring)
        expected = batch["input_ids"][rows.selected]
        actual = torch.full_like(expected, -1) if actual is None else actual
        # The M hidden states are in the order of the flattened ids.
        local_ids = rows.input_ids.flatten()[rows.hidden_index]
        indices = torch.arange(len(expected)) if rows.local is None else rows.local
        assert (rows.local is None) == (num_ranks == 1)
        assert (actual[indices] == -1).all()
        actual[indices] = local_ids
    assert actual is not None
    assert torch.equal(actual, expected)


def test_boundaries_and_positions_match_full_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of_rank(1, 2, monkeypatch, is_ring=False)
    assert rows.boundaries.tolist() == [0, 8, 15, 16, 19, 23, 24]
    assert (rows.longest, rows.num_positions) == (8, 8)
    assert rows.position_ids.tolist() == [[4, 5, 6, 7], [4, 5, 6, 0], [1, 2, 3, 0]]
    # Each sequence has four parts for two ranks, padded to a multiple of them.
    ring = rows_of_rank(0, 2, monkeypatch, is_ring=True)
    assert ring.boundaries.tolist() == [0, 8, 16, 20, 24, 28, 32]
    assert ring.longest == 8
