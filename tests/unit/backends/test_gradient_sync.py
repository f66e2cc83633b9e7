"""Gradient exchange between ranks: how often it happens, and that the sums are the same."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig, MegatronTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank, world_size
from nemo_rl_core.errors import ConfigError

EVERY, LAST = {"gradient_sync": "every_microbatch"}, {"gradient_sync": "last_microbatch"}
MAX_TOKENS = 24


def shard_of(part: int, num_parts: int, *, num_rows: int = 32) -> BatchedDataDict:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 12, (num_rows,), generator=generator).tolist()
    rows = [torch.randint(0, 16, (length,), generator=generator).tolist() for length in lengths]
    batch = collate(rows, [[index > 1 for index in range(length)] for length in lengths])
    # Uneven, so that the last rank ends with fillers.
    bounds = [num_rows * each**2 // num_parts**2 for each in range(num_parts + 1)]
    bounds = [num_rows - each for each in reversed(bounds)]
    return batch.select_indices(range(bounds[part], bounds[part + 1]))


def started(folder: Path, **training: Any) -> DTensorBackend:
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3),
            max_tokens_per_microbatch=MAX_TOKENS,
            training=DTensorTraining(**training),
        )
    )
    return backend


class Counted:
    """Counts calls by name."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def wrapped(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        return call


def trained(folder: Path, training: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Returns weights after two steps, and the reductions of the second one."""
    backend = started(folder, **training)
    shard = shard_of(rank(), world_size())
    backend.train_step(shard, NLLLoss())
    counted = Counted()
    sums = counted.wrapped("reduce_scatter", dist.reduce_scatter_single)
    with (
        mock.patch.object(dist, "reduce_scatter_single", sums),
        mock.patch.object(dist, "all_reduce", counted.wrapped("all_reduce", dist.all_reduce)),
    ):
        backend.train_step(shard, NLLLoss())
    weights = {name: tensor.clone() for name, tensor in backend.named_weights()}
    backend.shutdown()
    return weights, counted.calls


def trained_ways(folder: Path, ways: list[dict[str, Any]]) -> list[Any]:
    return [trained(folder, way) for way in ways]


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
def test_gradients_are_exchanged_once_per_step(tiny_model: Path) -> None:
    actual = run_ranks(trained_ways, tiny_model, [EVERY, LAST], world_size=2)
    (every, calls_every), (last, calls_last) = actual[0]
    assert_close(last, every)
    # Two layers, and embedding with head.
    assert calls_last["reduce_scatter"] == 3
    assert calls_every["reduce_scatter"] > 2 * calls_last["reduce_scatter"]
    assert calls_every["reduce_scatter"] % 3 == 0


@pytest.mark.slow
def test_hsdp_replicas_are_summed_once_per_step(tiny_model: Path) -> None:
    copies = {"data_parallel_replicas": 2}
    ways = [EVERY, EVERY | copies, LAST | copies]
    actual = run_ranks(trained_ways, tiny_model, ways, world_size=4, timeout_seconds=500.0)
    (sharded, calls_sharded), (every, calls_every), (last, calls_last) = actual[0]
    assert_close(every, sharded)
    assert_close(last, sharded)
    per_step = calls_last["all_reduce"]
    # In addition to those that count tokens and micro-batches, one per group of weights.
    assert calls_every["all_reduce"] == per_step == calls_sharded["all_reduce"] + 3
    assert calls_every["reduce_scatter"] > 2 * calls_last["reduce_scatter"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("training", [{}, {"lora": LoRAConfig(rank=4)}])
def test_single_rank_is_bitwise_identical(tiny_model: Path, training: dict[str, Any]) -> None:
    ways = [each | training | {"cpu_offload": True} for each in (EVERY, LAST)]
    ((every, _), (last, _)) = run_ranks(trained_ways, tiny_model, ways, world_size=1)[0]
    assert all(torch.equal(last[name], tensor) for name, tensor in every.items())


class Breaks:
    """A loss that raises in its second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("broken off")
        return NLLLoss()(*args, **kwargs)


def after_a_broken_step(folder: Path) -> tuple[float, float]:
    norms = []
    for breaks in (False, True):
        backend = started(folder, cpu_offload=True, **LAST)
        if breaks:
            with pytest.raises(ValueError, match="broken off"):
                backend.train_step(shard_of(0, 1), Breaks())
        norms.append(backend.train_step(shard_of(0, 1), NLLLoss())["grad_norm"])
    return norms[0], norms[1]


@pytest.mark.slow
def test_gradients_of_an_interrupted_step_are_dropped(tiny_model: Path) -> None:
    ((expected, after),) = run_ranks(after_a_broken_step, tiny_model, world_size=1)
    assert after == expected


def megatron_reductions(folder: Path) -> list[int]:
    """Returns the number of reductions in a step of one micro-batch and in one with many."""
    from megatron.core.distributed import param_and_grad_buffer

    from nemo_rl_core.backends.training.megatron.backend import MegatronBackend

    results = []
    for max_tokens in (512, MAX_TOKENS):
        backend = MegatronBackend()
        backend.setup(
            TrainingSetup(
                model_folder=folder,
                optimizer=OptimizerConfig(),
                max_tokens_per_microbatch=max_tokens,
                training=MegatronTraining(),
            )
        )
        counted = Counted()
        function = param_and_grad_buffer.dist_reduce_scatter_func
        with mock.patch.object(
            param_and_grad_buffer,
            "dist_reduce_scatter_func",
            counted.wrapped("reduce_scatter", function),
        ):
            backend.train_step(shard_of(rank(), world_size()), NLLLoss())
        results.append(counted.calls["reduce_scatter"])
        backend.shutdown()
    return results


@pytest.mark.slow
def test_megatron_exchanges_gradients_once_per_step(tiny_model: Path) -> None:
    one, many = run_ranks(megatron_reductions, tiny_model, world_size=2)[0]
    assert one == many > 0


def test_sums_in_16_bits_are_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="add up micro-batches in bfloat16"):
        DTensorTraining(gradient_sync="last_microbatch", reduce_dtype="bfloat16")
