"""State that workers keep, or must not keep, after a stage."""

from pathlib import Path

import pytest
import torch

from nemo_rl_core.backends.training.dtensor.checkpoint import TrainerState
from nemo_rl_core.backends.training.dtensor.mesh import join_mesh
from nemo_rl_core.backends.training.dtensor.microbatches import Microbatches
from nemo_rl_core.backends.training.optimizers import build_optimizer
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.distributed.batched_data_dict import collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.packing.plan import Microbatch


def num_groups() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_map)


def meshes_on_rank() -> tuple[list[int], list[int]]:
    counts, sizes = [], []
    weight = torch.nn.Parameter(torch.zeros(2))
    for training in (DTensorTraining(), DTensorTraining(), DTensorTraining(tensor_parallel_size=2)):
        mesh = join_mesh(training)
        assert mesh is not None
        TrainerState(torch.optim.AdamW([weight]), {"weight": weight})
        counts.append(num_groups())
        sizes.append(mesh.tokens["tensor"].size())
    # A rank that ends while another is still connecting its last group resets that connection.
    torch.distributed.barrier()
    return counts, sizes


@pytest.mark.slow
def test_ranks_keep_their_groups_in_a_second_setup() -> None:
    for counts, sizes in run_ranks(meshes_on_rank, world_size=2):
        assert counts[0] == counts[1] < counts[2]
        assert sizes == [1, 1, 2]


def test_plan_with_shared_rows_is_ignored_by_a_model_that_cannot_share_them() -> None:
    batch = collate([[1, 2], [3, 4]], [[True] * 2] * 2)
    batch.microbatches = [Microbatch(rows=((0, 1),), row_length=4)]
    for share_rows, rows in ((True, ((0, 1),)), (False, ((0,), (1,)))):
        parts = Microbatches(8, None).split(
            batch, share_rows=share_rows, device=torch.device("cpu")
        )
        assert [part.plan.rows for part in parts] == [rows]


def test_moments_in_8_bits_are_restored(tmp_path: Path) -> None:
    config = OptimizerConfig(moments="8bit", learning_rate=1e-2)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.ones(64, 80)) for _ in range(2)]
    saved, loaded = (build_optimizer([("weight", weight)], config) for weight in weights)
    gradients = torch.randn(4, 64, 80, generator=generator)
    for gradient in gradients[:3]:
        weights[0].grad = gradient.clone()
        saved.step()
    assert saved.state[weights[0]]["state1"].dtype == torch.uint8
    state = TrainerState(saved, {"weight": weights[0]})
    state.start_saving(tmp_path, num_updates=3)
    state.finish_saving()
    assert TrainerState(loaded, {"weight": weights[1]}).load(tmp_path) == 3
    weights[1].data.copy_(weights[0].data)
    for weight, optimizer in zip(weights, (saved, loaded), strict=True):
        weight.grad = gradients[3].clone()
        optimizer.step()
    assert torch.equal(*weights)


def megatron_on_rank(model: Path, damaged: Path) -> tuple[list[int], list[str], bool, float]:
    from nemo_rl_core.backends.training.base import TrainingSetup
    from nemo_rl_core.backends.training.megatron.backend import MegatronBackend
    from nemo_rl_core.errors import ModelError

    backend, counts = MegatronBackend(), []
    setup = TrainingSetup(
        model_folder=model,
        optimizer=OptimizerConfig(),
        max_tokens_per_microbatch=16,
        training=MegatronTraining(),
        reference_folder=damaged,
    )
    for _ in range(2):
        backend.setup(setup)
        counts.append(num_groups())
    before = {name: weight.clone() for name, weight in backend.named_weights()}
    batch = collate([[1, 2, 3]], [[False, True, True]])
    before = backend.get_logprobs(batch)
    refusals = []
    for _ in range(2):
        try:
            backend.get_reference_logprobs(batch)
        except ModelError as error:
            refusals.append(error.problem)
    same = all(torch.equal(weight, before[name]) for name, weight in backend.named_weights())
    return counts, refusals, same, (backend.get_logprobs(batch) - before).abs().max().item()


@pytest.mark.thorough
def test_megatron_keeps_groups_and_weights_if_a_reference_is_damaged(
    tiny_model: Path, tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    damaged = Path(shutil.copytree(tiny_model, tmp_path / "reference"))
    weights = {name: value + 1 for name, value in load_file(damaged / "model.safetensors").items()}
    del weights["model.norm.weight"]
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    for counts, refusals, same, moved in run_ranks(
        megatron_on_rank, tiny_model, damaged, world_size=2
    ):
        assert counts[0] == counts[1]
        assert len(refusals) == 2
        assert same
        assert moved == 0.0
