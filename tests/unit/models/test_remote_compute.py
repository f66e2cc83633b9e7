"""Several ranks read their rows of a remote batch and keep the results."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_core.backends.training.base import _TRAINING_BACKENDS, TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.distributed.batched_data_dict import (
    BatchedDataDict,
    InProcess,
    RemoteRows,
    as_block,
)
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.trainers.rollouts import train_in_parts
from tests.local_workers import LocalSession

NUM_RANKS = 3


class SumBackend:
    """Backend whose logprob of token i is `-i` and whose loss is a sum over rows."""

    def setup(self, setup: TrainingSetup) -> None:
        self.sizes: list[int] = []

    def prefix_sharing(self) -> None:
        return None

    def get_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        self.sizes.append(batch.size)
        return -batch["input_ids"][:, 1:].float() * batch["token_mask"]

    def forward_backward(self, batch: BatchedDataDict, loss_fn: Any) -> Any:
        return self.train_step(batch, loss_fn), self.get_logprobs(batch)

    def train_step(self, batch: BatchedDataDict, loss_fn: Any) -> dict[str, float]:
        self.seen = batch
        return {"loss": float(loss_fn(batch)), "num_valid_tokens": 1.0}


@pytest.fixture
def policy(tiny_model: Path) -> Iterator[Policy]:
    _TRAINING_BACKENDS["dtensor"] = SumBackend  # restored after the test
    session: Any = LocalSession(NUM_RANKS)
    yield Policy(session, TrainingSetup(tiny_model, OptimizerConfig(), 64))
    del _TRAINING_BACKENDS._registered["dtensor"]


def batches(size: int) -> tuple[BatchedDataDict, BatchedDataDict]:
    """Returns the same rows twice: local, and remote in blocks of up to four rows."""
    drawn = np.random.default_rng(0)
    lengths = torch.from_numpy(drawn.integers(3, 12, size))
    position = torch.arange(int(lengths.max()))
    ids = torch.from_numpy(drawn.integers(1, 99, (size, len(position))))
    columns = {
        "input_ids": torch.where(position < lengths[:, None], ids, 0),
        "token_mask": (position >= 2)[1:] & (position[1:] < lengths[:, None]),
    }
    blocks, sizes = [], []
    for start in range(0, size, 4):
        part = slice(start, start + 4)
        width = int(lengths[part].max())
        block = {
            "input_ids": columns["input_ids"][part, :width],
            "token_mask": columns["token_mask"][part, : width - 1],
        }
        blocks.append(InProcess(as_block({name: each.clone() for name, each in block.items()})))
        sizes.append(len(lengths[part]))
    short = {
        "input_lengths": lengths,
        "sample_mask": torch.ones(size),
        "advantages": torch.arange(size) - 2.0,
    }
    remote = BatchedDataDict({**short, "tokens": RemoteRows.of_blocks(blocks, sizes)})
    return BatchedDataDict({**short, **columns}), remote


def weighted(batch: BatchedDataDict) -> torch.Tensor:
    """Sums integers, so that the order does not matter, over all values of all rows."""
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    return (mask * batch["advantages"] * batch["input_ids"][:, 1:]).sum()


def backends(policy: Policy) -> list[SumBackend]:
    workers: Any = policy.workers
    backends_of_ranks: list[SumBackend] = workers.backends
    return backends_of_ranks


@pytest.mark.parametrize("size", [1, 3, 50])
def test_results_stay_with_the_ranks_and_are_in_the_order_of_the_batch(
    policy: Policy, size: int
) -> None:
    here, remote = batches(size)
    expected = policy.get_logprobs(here)["logprobs"]
    result = policy.get_logprobs(remote)
    assert isinstance(result["logprobs"], RemoteRows)
    remote["prev_logprobs"] = result["logprobs"]
    assert torch.equal(remote.fetched()["prev_logprobs"], expected)
    sizes = [backend.sizes[-1] for backend in backends(policy)]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= max(2, size // 8)  # shards have equal cost, not equal size


def test_a_step_reads_every_row_once_with_earlier_results(policy: Policy) -> None:
    here, remote = batches(50)
    for batch in (here, remote):
        batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]

    def off(batch: BatchedDataDict) -> torch.Tensor:
        assert batch["prev_logprobs"].shape == batch["token_mask"].shape
        same = -batch["input_ids"][:, 1:] * batch["token_mask"] == batch["prev_logprobs"]
        return (~same).sum()

    policy.train(remote, off)  # type: ignore[arg-type]
    assert [float(off(each.seen)) for each in backends(policy)] == [0.0] * NUM_RANKS
    policy.train(remote, weighted)  # type: ignore[arg-type]
    losses = [float(weighted(each.seen)) for each in backends(policy)]
    full = BatchedDataDict({**here, "advantages": here["advantages"][:, None]})
    assert sum(losses) == float(weighted(full))


def test_parts_of_a_batch_are_sharded_again(policy: Policy) -> None:
    """In a part, ranks get other rows and widths than in the full batch."""
    here, remote = batches(50)
    remote["prev_logprobs"] = policy.get_logprobs(remote)["logprobs"]
    seen: list[tuple[int, ...]] = []

    def loss(batch: BatchedDataDict) -> torch.Tensor:
        assert batch["prev_logprobs"].shape == batch["token_mask"].shape
        seen.extend(tuple(row[row > 0].tolist()) for row in batch["input_ids"])
        return weighted(batch)

    train_in_parts(policy, remote, loss, size=20)  # type: ignore[arg-type]
    assert sorted(seen) == sorted(tuple(row[row > 0].tolist()) for row in here["input_ids"])


def test_one_call_computes_scores_gradients_and_figures(policy: Policy) -> None:
    here, remote = batches(50)
    expected = policy.get_logprobs(here)["logprobs"]

    def figures(batch: BatchedDataDict) -> tuple[int, bool]:
        same = [
            torch.equal(batch[name], -batch["input_ids"][:, 1:].float() * batch["token_mask"])
            for name in ("scored", "prev_logprobs")
        ]
        return int(batch["input_ids"].sum()), all(same)

    result = policy.compute(
        remote,
        scores={"scored": "get_logprobs"},
        figures={"checked": figures},
        loss_fn=weighted,  # type: ignore[arg-type]
    )
    remote.update(result.columns)
    for name in ("scored", "prev_logprobs"):
        assert isinstance(result.columns[name], RemoteRows)
        assert torch.equal(remote.fetched()[name], expected)
    assert [same for _, same in result.figures["checked"]] == [True] * NUM_RANKS
    assert sum(total for total, _ in result.figures["checked"]) == int(here["input_ids"].sum())
    assert result.metrics["loss"] == float(weighted(backends(policy)[0].seen))


def test_scores_without_a_loss_compute_no_gradients(policy: Policy) -> None:
    _, remote = batches(50)
    result = policy.compute(remote, scores={"scored": "get_logprobs"}, figures={"sizes": len})
    assert set(result.columns) == {"scored"}
    assert not result.metrics
    assert not any(hasattr(backend, "seen") for backend in backends(policy))
