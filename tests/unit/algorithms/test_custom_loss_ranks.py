"""A custom loss on micro-batches, ranks and backends gives the step of the built-in formula."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank, world_size
from nemo_rl_core.errors import ConfigError, WorkerError
from nemo_rl_core.functional.custom_loss import CheckedLoss
from tests.unit.backends.megatron import test_megatron_backend as megatron
from tests.unit.backends.test_dtensor_ranks import make_backend, make_batch, rows_of

SOURCE = """
from nemo_rl_core.functional.masked import masked_sum, valid_token_mask

def nll(next_token_logprobs, batch, *, global_valid_seqs, global_valid_tokens):
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    return masked_sum(-next_token_logprobs, mask, denominator=global_valid_tokens), {}

def mean(next_token_logprobs, batch, *, global_valid_seqs, global_valid_tokens):
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    return masked_sum(-next_token_logprobs, mask, denominator=mask.sum()), {}
"""
dense = megatron.dense


@pytest.fixture
def loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the losses, which ranks import by its name."""
    (tmp_path / "losses_of_ranks.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield importlib.import_module("losses_of_ranks")
    del sys.modules["losses_of_ranks"]


def checked(fn: Any) -> CheckedLoss:
    return CheckedLoss(fn=fn, name=f"losses:{fn.__name__}", is_first_step=True)


def on_dtensor(folder: Path, axes: dict[str, Any], loss_fn: Any) -> list[dict[str, float]]:
    backend = make_backend(folder, axes)
    size = DTensorTraining(**axes).ranks_per_replica
    shard = make_batch().select_indices(rows_of(rank() // size, world_size() // size))
    return [backend.train_step(shard, loss_fn) for _ in range(2)]


def on_megatron(folder: Path, training: Any, loss_fn: Any) -> list[dict[str, float]]:
    backend = megatron.make_backend(folder, training)
    batch = megatron.make_batch()
    shard = batch.select_indices(megatron.rows_of_this_rank(batch))
    return [backend.train_step(shard, loss_fn) for _ in range(2)]


def test_one_rank_makes_the_steps_of_the_built_in_loss(tiny_model: Path, loss: Any) -> None:
    """In several micro-batches."""
    assert on_dtensor(tiny_model, {}, checked(loss.nll)) == on_dtensor(tiny_model, {}, NLLLoss())


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.thorough),
        pytest.param({"context_parallel_size": 2}, marks=pytest.mark.thorough),
    ],
)
def test_two_ranks_make_the_same_steps(axes: dict[str, Any], tiny_model: Path, loss: Any) -> None:
    single = on_dtensor(tiny_model, {}, NLLLoss())
    for steps in run_ranks(on_dtensor, tiny_model, axes, checked(loss.nll), world_size=2):
        for step, expected in zip(steps, single, strict=True):
            assert step == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(megatron.layout(), marks=pytest.mark.thorough),
        megatron.layout(1, 2),
        pytest.param(megatron.layout(2), marks=pytest.mark.thorough),
    ],
)
def test_megatron_makes_the_steps_of_the_built_in_loss(layout: Any, dense: Path, loss: Any) -> None:
    (single,) = run_ranks(on_megatron, dense, megatron.layout(), NLLLoss(), world_size=1)
    for steps in run_ranks(on_megatron, dense, layout, checked(loss.nll), world_size=2):
        for step, expected in zip(steps, single, strict=True):
            assert step == pytest.approx(expected, rel=1e-4)


@pytest.mark.thorough
def test_a_rank_refuses_a_wrong_loss_by_name(tiny_model: Path, dense: Path, loss: Any) -> None:
    with pytest.raises((ConfigError, WorkerError), match="losses:mean depends on the number"):
        run_ranks(on_dtensor, tiny_model, {}, checked(loss.mean), world_size=2)
    with pytest.raises((ConfigError, WorkerError), match="losses:mean depends on the number"):
        run_ranks(on_megatron, dense, megatron.layout(), checked(loss.mean), world_size=1)
