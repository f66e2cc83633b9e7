"""Data ranks with different rows compute the same number of micro-batches."""

from typing import Any

import pytest
import torch

from nemo_rl_core.backends.training.dtensor.mesh import join_mesh
from nemo_rl_core.backends.training.dtensor.microbatches import Microbatches
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.errors import DataError

LENGTHS = [[4, 4, 4], [2], []]
CPU = torch.device("cpu")


def batch_of(lengths: list[int]) -> BatchedDataDict:
    batch = collate([[1] * length for length in [*lengths, 4]], [[True] * n for n in [*lengths, 4]])
    return batch.select_indices(range(len(lengths)))


def on_rank() -> tuple[list[tuple[int, bool]], Any, dict[str, float], str]:
    mesh = join_mesh(DTensorTraining())
    assert mesh is not None
    microbatches = Microbatches(4, mesh)
    lengths = LENGTHS[rank()]
    parts = list(microbatches.split(batch_of(lengths), share_rows=True, device=CPU))
    actual = [(part.batch["input_ids"].shape[1], part.is_filler) for part in parts]
    metrics = mesh.sum_metrics({"loss": float(rank()), f"only_{rank()}": 1.0})
    try:
        list(Microbatches(3, mesh).split(batch_of(lengths), share_rows=True, device=CPU))
    except DataError as error:
        return actual, mesh.data_sum(torch.tensor(2.0)).item(), metrics, error.problem
    return actual, None, metrics, ""


@pytest.mark.slow
def test_ranks_agree_on_counts_sums_and_errors() -> None:
    first, second, third = run_ranks(on_rank, world_size=3)
    assert first[0] == [(4, False)] * 3
    assert second[0] == [(2, False), (2, True), (2, True)]
    assert third[0] == [(2, True)] * 3
    for actual in (first, second, third):
        assert actual[1] == 6.0
        assert actual[2] == {"loss": 3.0, "only_0": 1.0, "only_1": 1.0, "only_2": 1.0}
    assert "4 tokens does not fit" in first[3]
    assert "another data rank" in second[3]
    assert "another data rank" in third[3]


def test_plan_of_the_shard_is_used() -> None:
    batch = batch_of([2, 4])
    plan = next(Microbatches(8, None).split(batch, share_rows=False, device=CPU)).plan
    batch.microbatches = [plan, plan]
    parts = list(Microbatches(8, None).split(batch, share_rows=True, device=CPU))
    assert [part.plan for part in parts] == [plan, plan]


def test_single_rank_gets_no_fillers_and_its_own_error() -> None:
    assert list(Microbatches(8, None).split(batch_of([]), share_rows=True, device=CPU)) == []
    with pytest.raises(DataError, match="4 tokens does not fit"):
        list(Microbatches(3, None).split(batch_of([4]), share_rows=True, device=CPU))


def test_only_long_sequences_get_separate_microbatches() -> None:
    batch = batch_of([110, 40, 60, 50])
    parts = Microbatches(120, None).split(
        batch, share_rows=True, device=CPU, independent_length=100
    )
    assert [sorted(part.plan.indices) for part in parts] == [[0], [2, 3], [1]]
    with pytest.raises(DataError, match="110 tokens does not fit"):
        list(
            Microbatches(100, None).split(batch, share_rows=True, device=CPU, independent_length=64)
        )
