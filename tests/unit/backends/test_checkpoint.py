"""The trainer's state: other numbers of ranks, background saves, crashes, damage, other models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.backends.training.dtensor.checkpoint import TrainerState
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import StoreError


def make_model(seed: int = 0, *, mesh: Any = None) -> torch.nn.Module:
    torch.manual_seed(seed)
    # The second layer has one row, so that some ranks have nothing of it.
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1, bias=False))
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
    return model


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.rand(4, 3)).square().mean().backward()
        optimizer.step()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {}
    for name, parameter in model.named_parameters():
        for key, value in (*optimizer.state[parameter].items(), ("weight", parameter.detach())):
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[f"{name}.{key}"] = full.clone()
    return state


def saver(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> TrainerState:
    named = dict(model.named_parameters())
    return TrainerState(optimizer, named, weights=named)


def save_on_ranks(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Two FSDP ranks train, save, and train on while it is written; returns the saved state."""
    from torch.distributed.device_mesh import init_device_mesh

    from nemo_rl_core.distributed.process_group import join_process_group, rank, world_size

    join_process_group()
    model = make_model(mesh=init_device_mesh("cpu", (world_size(),)))
    optimizer = adamw(model)
    torch.manual_seed(10 + rank())
    train(model, optimizer, 2)
    saved, random = state_of(model, optimizer), torch.get_rng_state()
    state = saver(model, optimizer)
    state.start_saving(folder, num_updates=2)
    train(model, optimizer, 3)
    state.finish_saving()
    assert state.is_saved()
    assert not torch.equal(
        state_of(model, optimizer)["0.weight.exp_avg"], saved["0.weight.exp_avg"]
    )
    return saved, random


def load_on_ranks(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor, int]:
    from torch.distributed.device_mesh import init_device_mesh

    from nemo_rl_core.distributed.process_group import join_process_group, world_size

    join_process_group()
    model = make_model(seed=9, mesh=init_device_mesh("cpu", (world_size(),)))
    optimizer = adamw(model)
    num_updates = saver(model, optimizer).load(folder)
    return state_of(model, optimizer), torch.get_rng_state(), num_updates


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.slow
def test_save_of_two_ranks_resumes_on_one_two_or_three(tmp_path: Path) -> None:
    saves = run_ranks(save_on_ranks, tmp_path, world_size=2)
    assert not list(tmp_path.glob("*.metadata")) + list(tmp_path.glob("*.pt"))
    for world_size in (2, 1, 3):
        loads = run_ranks(load_on_ranks, tmp_path, world_size=world_size)
        for number, (state, random, num_updates) in enumerate(loads):
            assert_same(state, saves[0][0])
            assert num_updates == 2
            if number < 2:
                assert torch.equal(random, saves[number][1])
    # A model in a process that never had a process group.
    model = make_model(seed=9)
    optimizer = adamw(model)
    assert saver(model, optimizer).load(tmp_path) == 2
    assert_same(state_of(model, optimizer), saves[0][0])


@pytest.mark.parametrize("num_before", [0, 2])
def test_single_process_resumes_bitwise_identically(tmp_path: Path, num_before: int) -> None:
    straight = make_model()
    optimizer = adamw(straight)
    train(straight, optimizer, num_before)
    state = saver(straight, optimizer)
    state.start_saving(tmp_path, num_updates=num_before)
    train(straight, optimizer, 2)  # trains its state, not the state being written
    state.finish_saving()

    resumed = make_model(seed=9)
    other = adamw(resumed)
    train(resumed, other, 1)
    assert saver(resumed, other).load(tmp_path) == num_before
    train(resumed, other, 2)
    assert_same(state_of(resumed, other), state_of(straight, optimizer))
    # It also writes the same bytes, which identify artifacts.
    written = []
    for name, ended in (("straight", (straight, optimizer)), ("resumed", (resumed, other))):
        folder = tmp_path / name
        folder.mkdir()
        last = saver(*ended)
        last.start_saving(folder, num_updates=num_before + 2)
        last.finish_saving()
        written.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert written[0] == written[1]


@pytest.mark.slow
def test_save_of_one_process_resumes_on_two_ranks(tmp_path: Path) -> None:
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 2)
    state = saver(model, optimizer)
    state.start_saving(tmp_path, num_updates=2)
    state.finish_saving()
    for loaded, _, _ in run_ranks(load_on_ranks, tmp_path, world_size=2):
        assert_same(loaded, state_of(model, optimizer))


def test_disk_that_fills_up_is_named(small_disk: Path) -> None:
    model = torch.nn.Linear(600, 600)
    optimizer = adamw(model)
    model(torch.rand(4, 600)).square().mean().backward()
    optimizer.step()
    state = saver(model, optimizer)
    state.start_saving(small_disk, num_updates=1)  # 4.3 MB, in the background
    with pytest.raises(StoreError, match=f"could not be written to {small_disk}") as raised:
        state.finish_saving()
    assert "No space left" in str(raised.value.got)
    assert state.is_saved()


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    state = TrainerState(optimizer, dict(model.named_parameters()))
    state.start_saving(tmp_path, num_updates=1)
    state.finish_saving()
    yield tmp_path


def _cut(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"\x80\x04pickle?" * 9),
        lambda folder: (folder / "state.json").unlink(),
        lambda folder: (folder / "state.json").write_text("[]"),
    ],
)
def test_damaged_state_is_refused(saved: Path, damage: Any) -> None:
    damage(saved)
    model = make_model()
    optimizer = adamw(model)
    with pytest.raises(StoreError, match="cannot read the trainer's state"):
        TrainerState(optimizer, dict(model.named_parameters())).load(saved)
    assert not optimizer.state


def test_state_of_other_parameters_is_refused(saved: Path) -> None:
    wider = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Linear(6, 1, bias=False))
    renamed = torch.nn.ModuleDict({"head": torch.nn.Linear(3, 5)})
    for model, message in ((wider, r"has shape \(.*, but the parameter"), (renamed, "no such par")):
        optimizer = adamw(model)
        with pytest.raises(StoreError, match=message):
            TrainerState(optimizer, dict(model.named_parameters())).load(saved)
        assert not optimizer.state
    model = make_model()
    with pytest.raises(StoreError, match=r"other weights, such as 0\.bias"):
        saver(model, adamw(model)).load(saved)
