"""Checkpoints that move between layouts of ranks (`test_parity.py` compares results)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank, world_size

EPSILON = 1e-3  # see test_dtensor.py: a gradient of rounding must not move a weight
LENGTHS = [11, 4, 7, 2, 9, 3, 3, 8]
TWO_RANKS: dict[str, dict[str, Any]] = {
    "FSDP 2": {},
    "TP 2": {"tensor_parallel_size": 2},
    "TP 2 + SP": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "CP 2": {"context_parallel_size": 2},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "FSDP 2 x TP 2": {"tensor_parallel_size": 2},
    "HSDP 2 x 2": {"data_parallel_replicas": 2, "activation_checkpointing": True},
    "HSDP 2 x TP 2": {"data_parallel_replicas": 2, "tensor_parallel_size": 2},
    "CP 2 x TP 2 + SP": {
        "context_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
    },
    "FSDP 2 x CP 2": {"context_parallel_size": 2, "cpu_offload": True},
}


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 16, (n,), generator=generator).tolist() for n in LENGTHS]
    return collate(sequences, [[index >= n // 2 for index in range(n)] for n in LENGTHS])


def rows_of(data_rank: int, num_data_ranks: int) -> list[int]:
    """Returns uneven shards, and an empty one for the last of four ranks."""
    if num_data_ranks == 1:
        return list(range(len(LENGTHS)))
    bounds = {2: [0, 6, 8], 4: [0, 5, 6, 8, 8]}[num_data_ranks]
    return list(range(bounds[data_rank], bounds[data_rank + 1]))


def make_backend(folder: Path, axes: dict[str, Any]) -> DTensorBackend:
    optimizer = OptimizerConfig(
        learning_rate=1e-2, weight_decay=0.1, num_warmup_steps=2, adam_epsilon=EPSILON
    )
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=optimizer,
            training=DTensorTraining(**axes),
            max_tokens_per_microbatch=24,
            reference_folder=folder,
        )
    )
    return backend


def make_shard(axes: dict[str, Any]) -> tuple[list[int], BatchedDataDict]:
    ranks_per_replica = DTensorTraining(**axes).ranks_per_replica
    rows = rows_of(rank() // ranks_per_replica, world_size() // ranks_per_replica)
    return rows, make_batch().select_indices(rows)


def losses(folder: Path, layouts: dict[str, dict[str, Any]], saved: Path) -> dict[str, Any]:
    """Returns losses of the step after a checkpoint: without a resume, and at the next layout."""
    results: dict[str, Any] = {}
    names = list(layouts)
    for index, (name, axes) in enumerate(layouts.items()):
        backend = make_backend(folder, axes)
        rows, shard = make_shard(axes)
        reference = backend.get_reference_topk_logprobs(shard, 3)
        for _ in range(2):
            backend.train_step(shard, NLLLoss())
        checkpoint = saved / name
        checkpoint.mkdir(parents=True, exist_ok=True)
        backend.save_checkpoint(checkpoint)
        straight = backend.train_step(shard, NLLLoss())
        backend.shutdown()
        other = layouts[names[(index + 1) % len(names)]]
        resumed = make_backend(folder, other)
        resumed.load_checkpoint(checkpoint)
        step = resumed.train_step(make_shard(other)[1], NLLLoss())
        resumed.shutdown()
        results[name] = {"rows": rows, "reference": reference, "steps": (straight, step)}
    return results


@pytest.mark.thorough
@pytest.mark.parametrize(("num_ranks", "layouts"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_checkpoint_resumes_at_the_next_layout(
    tiny_model: Path, tmp_path: Path, num_ranks: int, layouts: dict[str, dict[str, Any]]
) -> None:
    single = losses(tiny_model, {"single": {}}, tmp_path)["single"]
    assert single["steps"][0] == single["steps"][1]  # bitwise identical
    ids, logprobs = single["reference"]
    found_by_rank = run_ranks(
        losses, tiny_model, layouts, tmp_path, world_size=num_ranks, timeout_seconds=500.0
    )
    for results in found_by_rank:
        for name, actual in results.items():
            for metrics in actual["steps"]:
                assert metrics == pytest.approx(single["steps"][0], rel=1e-5), name
            assert torch.equal(actual["reference"][0], ids[actual["rows"]]), name
            torch.testing.assert_close(actual["reference"][1], logprobs[actual["rows"]])
