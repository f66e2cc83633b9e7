"""Agreement of two Megatron ranks on masks, parts of rows, failures and files."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.distributed.batched_data_dict import collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.packing.plan import Microbatch, pack
from nemo_rl_core.distributed.process_group import join_process_group, rank
from nemo_rl_core.errors import DataError, StoreError

CONTEXT = MegatronTraining(context_parallel_size=2)


def mask_of_this_rank(last: list[list[int]]) -> torch.Tensor:
    import torch.distributed as dist

    from nemo_rl_core.backends.training.context_parallel import packed_causal_mask

    join_process_group()
    group = dist.group.WORLD
    assert group is not None
    return packed_causal_mask(torch.tensor(last), group)


def test_token_attends_to_its_sequence_up_to_itself() -> None:
    first, second = run_ranks(mask_of_this_rank, [[1, 1, 2, 3]], world_size=2)
    seen = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert torch.equal(first, torch.tensor([[seen[:2]]], dtype=torch.bool))
    assert torch.equal(second, torch.tensor([[seen[2:]]], dtype=torch.bool))


def positions_of_this_rank() -> list[int]:
    from nemo_rl_core.backends.training.megatron.rows import rank_positions
    from nemo_rl_core.backends.training.megatron.topology import initialize_topology

    initialize_topology(CONTEXT)
    ids = torch.zeros(2, 4, dtype=torch.long)
    plan = Microbatch(rows=((0,), (1,)), row_length=4)
    return rank_positions(pack(ids, torch.tensor([4, 3]), plan)).tolist()


def refused_rows() -> tuple[type[Exception], str]:
    """Plans rows where the second data rank has a sequence of 9 tokens, and 8 fit."""
    from nemo_rl_core.backends.training.megatron.parts import make_parts
    from nemo_rl_core.backends.training.megatron.topology import initialize_topology

    initialize_topology(MegatronTraining())
    length = [4, 9][rank()]
    batch = collate([[1] * length], [[True] * length])
    with pytest.raises(DataError) as caught:
        make_parts(batch, None, max_tokens=8, device=torch.device("cpu"))
    return type(caught.value), str(caught.value)


def shards(value: float) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns this rank's half of four numbers, and the state that names it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    half = torch.full((2,), value + rank())
    return half, {"half": ShardedTensor.from_rank_offsets("numbers", half, (0, rank(), 2))}


def written_while_it_changes(path: Path) -> list[float]:
    """Returns a saved state that was changed before its save was finished."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from nemo_rl_core.backends.training.megatron.topology import initialize_topology
    from nemo_rl_core.backends.training.megatron.writing import PendingWrite, on_rank_0

    initialize_topology(MegatronTraining())
    on_rank_0(path.mkdir)
    half, state = shards(1.0)
    writing = PendingWrite(path, state)
    half.fill_(-1.0)
    writing.finish()
    assert writing.is_done()
    dist.barrier()
    loaded: torch.Tensor = dist_checkpointing.load(shards(0.0)[1], str(path))["half"]
    return loaded.tolist()


def refused_by_the_second_disk(path: Path) -> str:
    from nemo_rl_core.backends.training.megatron.topology import initialize_topology
    from nemo_rl_core.backends.training.megatron.writing import PendingWrite, on_rank_0

    initialize_topology(MegatronTraining())
    on_rank_0((path / "__1_0.distcp").mkdir)  # in the way of a file
    writing = PendingWrite(path, shards(1.0)[1])
    with pytest.raises(StoreError) as caught:
        writing.finish()
    with pytest.raises(StoreError):
        on_rank_0(path.mkdir)
    return str(caught.value)


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.thorough
def test_ranks_agree_on_positions_failures_and_files(tmp_path: Path) -> None:
    (tmp_path / "refused").mkdir()

    def run() -> tuple[Any, ...]:
        return (
            refused_rows(),
            [written_while_it_changes(tmp_path / name) for name in ("once", "again")],
            refused_by_the_second_disk(tmp_path / "refused"),
            positions_of_this_rank(),
        )

    first, second = run_ranks(run, world_size=2)
    for actual in (first, second):
        assert actual[0][0] is DataError
    assert "of another data rank do not fit" in first[0][1]
    assert first[1] == [[1.0, 1.0]] * 2
    assert second[1] == [[2.0, 2.0]] * 2
    for actual in (first, second):
        assert "on rank 1: IsADirectoryError" in actual[2]
    assert (first[3], second[3]) == ([0, 1, 4, 5], [2, 3, 6, 7])
    assert digests(tmp_path / "once") == digests(tmp_path / "again")
