"""Saves without a full model: each rank writes and describes its shards, and continues."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup, get_training_backend
from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.store.files import hash_file, list_files

LENGTHS = [11, 4, 7, 2]
LAYOUTS: dict[str, Any] = {
    "FSDP 2": DTensorTraining(),
    "TP 2": DTensorTraining(tensor_parallel_size=2),
    "megatron TP 2": MegatronTraining(tensor_parallel_size=2),
}


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 16, (n,), generator=generator).tolist() for n in LENGTHS]
    return collate(sequences, [[index >= n // 2 for index in range(n)] for n in LENGTHS])


def started(folder: Path, training: Any) -> Any:
    backend = get_training_backend(training.backend)()
    optimizer = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, num_warmup_steps=2)
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=optimizer,
            training=training,
            max_tokens_per_microbatch=24,
        )
    )
    return backend


def weights(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in backend.named_weights()}


def on_rank(
    folder: Path, training: Any, path: Path
) -> tuple[dict[str, WrittenFile], list[dict[str, torch.Tensor]]]:
    """Returns this rank's files and the weights two steps later: without a resume, and with two."""
    shards, full = path / "shards", path / "full"
    first = started(folder, training)
    for _ in range(2):
        first.train_step(make_batch(), NLLLoss())
    first.save_checkpoint(full)
    named_weights, first.named_weights = first.named_weights, _refuse
    first.start_sharded_checkpoint(shards)
    first.named_weights = named_weights
    for _ in range(2):
        first.train_step(make_batch(), NLLLoss())  # while it is written
    written, actual = first.finish_checkpoint(), [weights(first)]
    first.shutdown()
    for saved in (shards, full):
        resumed = started(folder, training)
        resumed.load_checkpoint(saved)
        for _ in range(2):
            resumed.train_step(make_batch(), NLLLoss())
        actual.append(weights(resumed))
        resumed.shutdown()
    return written, actual


def _refuse() -> Any:
    raise AssertionError("weights are gathered")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_resume_bitwise_identically(tiny_model: Path, tmp_path: Path, layout: str) -> None:
    for name in ("shards", "full"):
        (tmp_path / name).mkdir()
    ranks = run_ranks(
        on_rank, tiny_model, LAYOUTS[layout], tmp_path, world_size=2, timeout_seconds=300.0
    )
    for _, (straight, *resumed) in ranks:
        for each in resumed:
            assert each.keys() == straight.keys()
            for name, weight in straight.items():
                assert torch.equal(weight, each[name]), name
    saved = tmp_path / "shards"
    assert {path.name for path in saved.iterdir()} == {"trainer"}
    _assert_each_describes_its_own(saved, [written for written, _ in ranks])


def _assert_each_describes_its_own(saved: Path, by_rank: list[dict[str, WrittenFile]]) -> None:
    described = [set(written) for written in by_rank]
    assert not described[0] & described[1]
    assert all(described)
    large = {name for name in list_files(saved) if name.endswith((".safetensors", ".distcp"))}
    assert large <= described[0] | described[1]
    for written in by_rank:
        for name, file in written.items():
            path = saved / name
            assert (file.sha256, file.num_bytes) == (hash_file(path), path.stat().st_size), name


def test_single_process_resumes_from_sharded_weights(tiny_model: Path, tmp_path: Path) -> None:
    straight = started(tiny_model, DTensorTraining())
    straight.train_step(make_batch(), NLLLoss())
    straight.start_sharded_checkpoint(tmp_path)
    straight.train_step(make_batch(), NLLLoss())
    written = straight.finish_checkpoint()
    assert set(written) == set(list_files(tmp_path))
    resumed = started(tiny_model, DTensorTraining())
    resumed.load_checkpoint(tmp_path)
    resumed.train_step(make_batch(), NLLLoss())
    after = weights(resumed)
    for name, weight in weights(straight).items():
        assert torch.equal(weight, after[name]), name


def test_full_save_has_no_weights_among_the_shards(tiny_model: Path, tmp_path: Path) -> None:
    """Artifacts stay the same as before, byte for byte."""
    from safetensors import safe_open

    backend = started(tiny_model, DTensorTraining())
    backend.train_step(make_batch(), NLLLoss())
    backend.start_checkpoint(tmp_path)
    written = backend.finish_checkpoint()
    assert set(written) == set(list_files(tmp_path))
    (shard,) = (tmp_path / "trainer").glob("*.safetensors")
    with safe_open(shard, framework="pt") as file:
        assert not [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118
