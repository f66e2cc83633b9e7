"""A policy over two ranks: rows are split by data parallelism and returned in order.

The backend is a small one in this file with hand-computable answers: rank and row determine them.
Real backends over ranks are tested with their unit tests, without Ray.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from nemo_rl_core.backends.training.base import _TRAINING_BACKENDS, TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.process_group import join_process_group, rank, world_size
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.weight_sync.link import (
    ReceivesWeights,
    SendsWeights,
    WeightLink,
    make_buckets,
)
from nemo_rl_core.distributed.worker_group import RayWorkerGroup
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.policy import Policy

pytestmark = pytest.mark.slow


class SumBackend(SendsWeights):
    """A training backend whose model is one number: the logprob of token i is `-weight * i`."""

    def setup(self, setup: TrainingSetup) -> None:
        join_process_group(timeout_seconds=60)
        self.weight = torch.ones(1)
        self.data_axis = setup.training.tensor_parallel_size == 1

    def get_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        return -self.weight * batch["input_ids"][:, 1:] * batch["token_mask"]

    def get_reference_topk_logprobs(self, batch: BatchedDataDict, k: int) -> Any:
        ids = batch["input_ids"][:, 1:, None].expand(-1, -1, k)
        return ids, -ids.float()

    def get_values(self, batch: BatchedDataDict) -> torch.Tensor:
        # The rank that computed a row and its number of micro-batches.
        code = rank() + 10 * len(batch.microbatches or ())
        return torch.full(batch["input_ids"].shape, float(code))

    def train_step(self, batch: BatchedDataDict, loss_fn: Any) -> dict[str, float]:
        total = torch.tensor(float(loss_fn(batch)))
        if self.data_axis:
            torch.distributed.all_reduce(total)
        self.weight += total
        return {"loss": total.item()}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        torch.distributed.all_reduce(torch.ones(1))  # a collective: all ranks must be asked
        yield "weight", self.weight

    def save_checkpoint(self, path: Path) -> None:
        (path / f"rank_{rank()}_of_{world_size()}").write_text(str(self.weight.item()))

    def load_checkpoint(self, path: Path) -> None:
        self.weight = torch.tensor([float(next(path.glob(f"rank_{rank()}_*")).read_text())])

    def peak_memory_gib(self) -> float:
        return 1.0


def batch_of(size: int, *, pairs: bool = False) -> BatchedDataDict:
    """Returns rows of different lengths; row i has the token i + 1, so that sums identify rows."""
    lengths = torch.tensor([3 + (5 * row) % 4 for row in range(size)], dtype=torch.long)
    positions = torch.arange(6)
    ids = torch.where(positions < lengths[:, None], torch.arange(1, size + 1)[:, None], 0)
    columns = {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": positions[1:] < lengths[:, None],
        "sample_mask": torch.ones(size),
    }
    if pairs:
        columns["pair_ids"] = torch.arange(size) // 2
    return BatchedDataDict(columns)


def total_of_firsts(batch: BatchedDataDict) -> torch.Tensor:
    return batch["input_ids"][:, 0].sum()


@pytest.fixture(scope="module")
def setup(tiny_model: Path) -> TrainingSetup:
    return TrainingSetup(
        model_folder=tiny_model, optimizer=OptimizerConfig(), max_tokens_per_microbatch=12
    )


@pytest.fixture(scope="module")
def cluster(session: ClusterSession) -> Iterator[RayVirtualCluster]:
    with RayVirtualCluster([2], use_gpus=False, num_cpus_per_bundle=0.01) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def small_backend() -> Iterator[None]:
    _TRAINING_BACKENDS["dtensor"] = SumBackend  # the built-in one is found again afterwards
    yield
    del _TRAINING_BACKENDS._registered["dtensor"]


@pytest.fixture(scope="module")
def policy(
    small_backend: None, cluster: RayVirtualCluster, setup: TrainingSetup
) -> Iterator[Policy]:
    policy = Policy(cluster, setup)
    yield policy
    policy.shutdown()


@pytest.mark.parametrize("size", [1, 2, 7])
def test_rows_come_back_in_order(policy: Policy, size: int) -> None:
    batch = batch_of(size)
    expected = -batch["input_ids"][:, 1:].float() * batch["token_mask"]
    logprobs = policy.get_logprobs(batch)["logprobs"]
    assert torch.equal(logprobs / logprobs[0, 0], expected / expected[0, 0])
    top = policy.get_reference_topk_logprobs(batch, 2)
    assert torch.equal(top["topk_ids"], batch["input_ids"][:, 1:, None].expand(-1, -1, 2))
    assert torch.equal(top["topk_logprobs"], -top["topk_ids"].float())


def test_ranks_have_equally_many_microbatches_and_pairs_stay_together(policy: Policy) -> None:
    values = policy.get_values(batch_of(8, pairs=True))["values"]
    ranks, counts = values[:, 0] % 10, values[:, 0] // 10
    assert set(ranks.tolist()) == {0, 1}
    assert counts.unique().numel() == 1
    assert counts[0] >= 1
    assert torch.equal(ranks[0::2], ranks[1::2])


def test_a_step_is_one_step_of_all_ranks(policy: Policy, tmp_path: Path) -> None:
    before = policy.get_logprobs(batch_of(1))["logprobs"][0, 0].item()
    assert policy.train(batch_of(7), total_of_firsts) == {"loss": 28.0}  # 1 + 2 + ... + 7
    after = policy.get_logprobs(batch_of(1))["logprobs"][0, 0].item()
    assert after == before - 28.0
    assert policy.peak_memory_gib() == 2.0
    policy.save_checkpoint(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["rank_0_of_2", "rank_1_of_2"]
    policy.train(batch_of(1), total_of_firsts)
    policy.load_checkpoint(tmp_path)
    assert policy.get_logprobs(batch_of(1))["logprobs"][0, 0].item() == after


class Taker(ReceivesWeights):
    """An engine whose model is that number."""

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.taken = [(name, tensor.item()) for name, tensor in named_tensors]

    def what_was_taken(self) -> list[tuple[str, float]]:
        return self.taken


def test_the_first_rank_sends_all_weights(policy: Policy, session: ClusterSession) -> None:
    engine = RayWorkerGroup(session.cluster, Taker)
    for _ in range(2):
        link = WeightLink.between(policy.workers, engine, timeout_seconds=60)
        digest = link.transfer()
        weight = -policy.get_logprobs(batch_of(1))["logprobs"][0, 0].item()
        assert engine.run_single_worker("what_was_taken") == [("weight", weight)]
        (bucket,) = make_buckets(
            [("weight", torch.tensor([weight]))],
            bucket_bytes=1024,
            allocate=partial(torch.empty, dtype=torch.uint8),
        )
        assert digest == xxhash.xxh3_128(bucket.digest.encode()).hexdigest()
    engine.shutdown()


def test_ranks_of_one_copy_see_the_same_rows(
    small_backend: None, policy: Policy, setup: TrainingSetup, cluster: RayVirtualCluster
) -> None:
    policy.shutdown()
    split = Policy(cluster, replace(setup, training=DTensorTraining(tensor_parallel_size=2)))
    batch = batch_of(5)
    assert torch.equal(
        split.get_logprobs(batch)["logprobs"], -batch["input_ids"][:, 1:] * batch["token_mask"]
    )
    assert split.train(batch, total_of_firsts) == {"loss": 15.0}
    with pytest.raises(NotImplementedError, match="give the weights to an engine"):
        split.generate(batch, greedy=True)
    split.shutdown()
    split.shutdown()


def test_part_of_a_copy_is_refused_before_anything_starts(setup: TrainingSetup) -> None:
    two = RayVirtualCluster([2], use_gpus=False)
    with pytest.raises(ConfigError, match="2 workers cannot hold complete copies"):
        Policy(two, replace(setup, training=DTensorTraining(tensor_parallel_size=4)))
