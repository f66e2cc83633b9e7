"""`training.compile`: layers are compiled whatever wraps them, and compute the same values.

Dynamo's frames are counted; AOTAutograd runs their graphs without Inductor, which needs a compiler.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks

SHAPES = ([7, 5], [3, 9, 4], [11], [6, 6, 6, 2], [2, 13])
MAX_GRAPHS = 6  # one or several rows, with or without gradients, from frozen or trained weights
needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao: `make test-float8`"
)


def batch_of(lengths: list[int]) -> BatchedDataDict:
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(0, 16, (length,), generator=generator).tolist() for length in lengths]
    return collate(rows, [[True] * length for length in lengths])


def trained(folder: Path, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int, int]:
    """Returns weights after one step per shape, and Dynamo's numbers of graphs and graph breaks."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    backend = DTensorBackend()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        backend.setup(
            TrainingSetup(
                model_folder=folder,
                optimizer=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3),
                max_tokens_per_microbatch=24,
                training=DTensorTraining(**options),
            )
        )
    for lengths in SHAPES:
        backend.train_step(batch_of(lengths), NLLLoss())
    weights = {name: tensor.clone() for name, tensor in backend.named_weights()}
    backend.shutdown()
    return weights, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def assert_compiled(
    folder: Path, options: dict[str, Any], *, world_size: int, tolerance: float = 2e-6
) -> None:
    def run() -> tuple[Any, Any]:
        return trained(folder, options), trained(folder, options | {"compile": True})

    (eager, no_graphs, _), (compiled, num_graphs, num_breaks) = (
        run() if world_size == 1 else run_ranks(run, world_size=world_size)[0]
    )
    assert no_graphs == 0
    assert 0 < num_graphs <= MAX_GRAPHS and num_breaks == 0
    assert eager.keys() == compiled.keys()
    for name, weight in eager.items():
        assert (weight - compiled[name]).abs().max() <= tolerance, name


RECOMPUTED, LORA = {"activation_checkpointing": True}, {"lora": {"rank": 4}}
slow, thorough = pytest.mark.slow, pytest.mark.thorough


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        pytest.param(RECOMPUTED, 1, id="recomputed", marks=slow),
        pytest.param({}, 1, id="kept", marks=thorough),
        pytest.param(RECOMPUTED, 2, id="recomputed, FSDP2", marks=slow),
        pytest.param({}, 2, id="kept, FSDP2", marks=thorough),
        pytest.param(RECOMPUTED | LORA, 1, id="recomputed, LoRA", marks=thorough),
        pytest.param(RECOMPUTED | LORA, 2, id="recomputed, LoRA, FSDP2", marks=thorough),
    ],
)
def test_layers_are_compiled(tiny_model: Path, options: dict[str, Any], world_size: int) -> None:
    assert_compiled(tiny_model, options, world_size=world_size)


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_float8_layers_are_compiled(tiny_model: Path, recipe: str, world_size: int) -> None:
    """The tolerance is wide, since values between two float8 numbers may round either way."""
    options = {"activation_checkpointing": True, "float8": recipe}
    assert_compiled(tiny_model, options, world_size=world_size, tolerance=1e-3)
