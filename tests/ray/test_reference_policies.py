"""Runs the reference documents' examples of clusters, worker groups and policies by name."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms import DPOLossFn, DPOTrainer
from nemo_rl_core.distributed import BatchedDataDict, RayVirtualCluster, RayWorkerGroup
from nemo_rl_core.distributed.batched_data_dict import collate
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.models import HuggingFacePolicy

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "0"}
    for a in range(3, 9)
    for b in range(3)
]


class OwnPolicy:
    """The class that a worker group creates in each bundle."""

    def train(self, batch: BatchedDataDict) -> int:
        return batch.size


@pytest.mark.thorough
def test_the_same_code_at_any_scale(session: ClusterSession) -> None:
    assert RayVirtualCluster([8, 8]).world_size == 16
    with RayVirtualCluster([1], use_gpus=False, num_cpus_per_bundle=0.01) as cluster:
        worker_group = RayWorkerGroup(cluster, OwnPolicy)
        rows = BatchedDataDict({"input_ids": torch.zeros(3, 2)})
        assert worker_group.run_all_workers_single_data("train", rows) == [3]
        worker_group.shutdown()


@pytest.mark.thorough
def test_a_policy_by_name_and_a_trainer_for_it(
    session: ClusterSession, tiny_model: Path, tmp_path: Path
) -> None:
    with RayVirtualCluster(
        [1], use_gpus=False, max_colocated_worker_groups=2, num_cpus_per_bundle=0.01
    ) as cluster:
        policy = HuggingFacePolicy(
            str(tiny_model), cluster, torch_dtype="float32", device_map="auto", learning_rate=0.01
        )
        batch: Any = collate([(1, 5, 6), (1, 5, 7)], [(False, True, True)] * 2)
        first = policy.get_logprobs(batch)["logprobs"]
        reference = policy.get_reference_logprobs(batch)["logprobs"]
        assert torch.equal(first, reference)
        batch["pair_ids"] = torch.zeros(2, dtype=torch.int64)
        batch["is_chosen"] = torch.tensor([True, False])
        batch["reference_logprobs"] = reference
        loss = policy.train(batch, DPOLossFn())["loss"]
        assert loss == pytest.approx(math.log(2), abs=1e-6)
        assert policy.train(batch, DPOLossFn())["loss"] < loss
        assert torch.equal(policy.get_reference_logprobs(batch)["logprobs"], reference)

        trainer = DPOTrainer(policy, cluster, num_steps_per_iteration=2, num_pairs_per_step=4)
        result = trainer.train(PAIRS)
        assert result.metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        # The policy now has the trained weights of the checkpoint.
        trained = policy.get_logprobs(batch)["logprobs"]
        assert not torch.equal(trained, reference)
        again = HuggingFacePolicy(result.checkpoint, cluster)
        policy.shutdown()
        assert torch.equal(again.get_logprobs(batch)["logprobs"], trained)
        again.shutdown()
        trainer.session.discard("training")
