"""A trainer whose state moves to the host while an engine generates: same results, less memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.distributed.tensor import DTensor

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training import offload
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.offload import OffloadedState, optimizer_tensors
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import (
    DTensorTraining,
    LoRAConfig,
    MegatronTraining,
    TrainingConfig,
)
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank, world_size

OFFLOADS = ("none", "optimizer", "all")


def make_batch(*, rows: slice = slice(None)) -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(0, 16, (length,), generator=generator).tolist() for length in (11, 4, 7, 9)
    ]
    return collate(sequences[rows], [[True] * len(each) for each in sequences[rows]])


def started(folder: Path, training: TrainingConfig) -> Any:
    from nemo_rl_core.backends.training.base import get_training_backend

    backend: Any = get_training_backend(training.backend)()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            reference_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, num_warmup_steps=2),
            max_tokens_per_microbatch=24,
            training=training,
        )
    )
    return backend


def resident_bytes(backend: Any) -> dict[str, int]:
    """Returns the bytes of each part of the state that torch owns; files are mapped on a CPU."""
    resident = {}
    for name, tensors in backend._memory._parts.items():
        local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors()]
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in local}
        resident[name] = sum(each.nbytes() for each in storages.values() if each.resizable())
    return resident


def two_iterations(folder: Path, training: TrainingConfig) -> tuple[Any, dict[str, int]]:
    """Returns the results of two iterations, and the bytes in memory while sampling."""
    copies = training.data_parallel_size(world_size())
    batch = make_batch(rows=slice(rank() % copies, None, copies))
    backend = started(folder, training)
    results: list[Any] = []
    for _ in range(2):
        backend.release_memory(keeps_weights=True)
        results.append({name: each.cpu().clone() for name, each in backend.named_weights()})
        backend.release_memory()
        resident = resident_bytes(backend)
        backend.release_memory()  # a second call, with nothing left to do
        results.append(backend.get_logprobs(batch))
        results.append(backend.get_reference_logprobs(batch))
        results.append(backend.train_step(batch, NLLLoss()))
    backend.shutdown()
    return results, resident


CASES = {
    "one rank": (1, partial(DTensorTraining)),
    "adapters": (1, partial(DTensorTraining, lora=LoRAConfig(rank=4))),
    "shards": (2, partial(DTensorTraining)),
    "tensor parallel": (2, partial(DTensorTraining, tensor_parallel_size=2)),
    "megatron": (1, partial(MegatronTraining)),
    "megatron's pipeline": (2, partial(MegatronTraining, pipeline_parallel_size=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_results_do_not_depend_on_offloading(case: str, tiny_model: Path) -> None:
    size, training = CASES[case]

    def on_rank() -> list[Any]:
        return [two_iterations(tiny_model, training(offload_for_generation=o)) for o in OFFLOADS]

    for (stays, all_held), (moves, without_moments), (leaves, nothing) in run_ranks(
        on_rank, world_size=size
    ):
        torch.testing.assert_close([moves, leaves], [stays, stays], rtol=0, atol=0)
        assert not torch.equal(stays[1], stays[5])  # training has changed it
        assert size == 1 or min(all_held.values()) > 0
        assert without_moments["weights"] == all_held["weights"]
        # In Megatron's float32 optimizer, the copies of weights are the weights.
        assert without_moments["optimizer"] < all_held["optimizer"]
        assert set(nothing.values()) == {0}


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "get_logprobs": lambda it, _: it.get_logprobs(make_batch()),
    "get_reference_logprobs": lambda it, _: it.get_reference_logprobs(make_batch()),
    "get_reference_topk_logprobs": lambda it, _: it.get_reference_topk_logprobs(make_batch(), 2),
    "forward_backward": lambda it, _: it.forward_backward(make_batch(), NLLLoss()),
    "train_step": lambda it, _: it.train_step(make_batch(), NLLLoss()),
    "named_weights": lambda it, _: {n: w.clone() for n, w in it.named_weights()},
    "save_checkpoint": lambda it, folder: it.save_checkpoint(folder),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_every_call_restores_the_parts_that_it_needs(
    backend: str, tiny_model: Path, tmp_path: Path
) -> None:
    kind = {"dtensor": DTensorTraining, "megatron": MegatronTraining}[backend]

    def on_rank() -> list[tuple[str, Any, Any]]:
        here, away = (
            started(tiny_model, kind(offload_for_generation=offload)) for offload in ("none", "all")
        )
        results = []
        for trainer in (here, away):
            trainer.train_step(make_batch(), NLLLoss())  # from now on there are moments
        for name, call in CALLS.items():
            away.release_memory()
            folders = [tmp_path / f"{name}-{place}" for place in ("here", "away")]
            for folder in folders:
                folder.mkdir()
            results.append((name, call(here, folders[0]), call(away, folders[1])))
        away.release_memory()
        away.load_checkpoint(tmp_path / "save_checkpoint-here")
        here.load_checkpoint(tmp_path / "save_checkpoint-here")
        results.append(
            ("load_checkpoint", *(trainer.get_logprobs(make_batch()) for trainer in (here, away)))
        )
        return results

    (results,) = run_ranks(on_rank, world_size=1)
    for name, here, away in results:
        torch.testing.assert_close(away, here, rtol=0, atol=0, msg=name)
    files = {
        place: {
            path.relative_to(folder): path.read_bytes()
            for path in sorted(folder.rglob("*.safetensors"))
        }
        for place in ("here", "away")
        if (folder := tmp_path / f"save_checkpoint-{place}")
    }
    assert files["here"] == files["away"]


def test_memory_is_freed_in_place_and_restored() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    view = weight.detach()[1]
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    expected = {"weight": weight.detach().clone(), "moment": optimizer.state[weight]["exp_avg"]}
    expected["moment"] = expected["moment"].clone()
    # The optimizer's part contains the weight, too; shared memory belongs to the first part.
    state = OffloadedState(
        {"weights": lambda: [weight], "optimizer": lambda: [weight, *optimizer_tensors(optimizer)]}
    )
    state.offload(["optimizer"])
    assert weight.untyped_storage().nbytes() == 24
    assert optimizer.state[weight]["exp_avg"].untyped_storage().nbytes() == 0
    state.offload(["optimizer", "weights"])
    assert weight.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    state.restore("weights", "optimizer")
    assert torch.equal(weight, expected["weight"])
    assert torch.equal(view, expected["weight"][1])
    assert torch.equal(optimizer.state[weight]["exp_avg"], expected["moment"])


def test_weights_that_live_on_the_host_are_not_moved_there() -> None:
    with pytest.raises(ValidationError, match="always keeps weights"):
        DTensorTraining(cpu_offload=True, offload_for_generation="optimizer")


def test_pinned_memory_has_the_size_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch rounds each pinned allocation up to a power of two."""
    monkeypatch.setattr(offload, "_BLOCK_BYTES", 64 * 1024)
    weights = [torch.arange(34 * 1024 // 4, dtype=torch.int32) + index for index in range(20)]
    small = [torch.full((3,), 7, dtype=torch.uint8), torch.tensor([1.5])]
    expected = [each.clone() for each in (*weights, *small)]
    state = OffloadedState({"weights": lambda: weights, "optimizer": lambda: small})
    allocated: list[int] = []
    empty = torch.empty

    def counted(size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "pin_memory" in kwargs:
            allocated.append(size)
        return empty(size, *args, **kwargs)

    monkeypatch.setattr(torch, "empty", counted)
    for _ in range(2):
        state.offload(["weights", "optimizer"])
        assert [each.untyped_storage().nbytes() for each in (*weights, *small)] == [0] * 22
        state.restore("optimizer", "weights")
        assert all(map(torch.equal, (*weights, *small), expected))
    # 20 x 34 KiB are 680: ten blocks, and 40 KiB in one of 64. Separately, each would take 64 KiB.
    # 3 + 4 bytes take 8. The second time nothing is allocated.
    assert sorted(allocated) == [8] + [64 * 1024] * 11
