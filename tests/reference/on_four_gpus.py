"""Runs a block of the documents that requests GPUs: `python -m tests.reference.on_four_gpus`.

Ray is started with 16 GPUs that need not exist: it places, starts and connects the requested
workers, which see no GPU and compute on the CPU.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.reference.code_blocks import make_folders, run


def scaled() -> None:
    """16 workers answer in the order of their ranks."""

    class Ranked:
        def rank(self) -> str:
            return os.environ["RANK"]

    from nemo_rl_core.distributed import RayVirtualCluster, RayWorkerGroup

    names = {"RayVirtualCluster": RayVirtualCluster, "RayWorkerGroup": RayWorkerGroup}
    group = run(sys.argv[1], {**names, "policy_class": Ranked})["worker_group"]
    assert group.run_all_workers_single_data("rank") == [str(rank) for rank in range(16)]


def dpo() -> None:
    """Four ranks train on pairs."""
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0"} for n in range(90)]
    trainer = run(sys.argv[1], {"dataset": pairs})["trainer"]
    assert trainer.session.cluster.world_size == 4


def engines() -> None:
    """Four engines complete prompts."""
    import torch

    from nemo_rl_core.distributed import BatchedDataDict

    generator = run("001_L137")["generator"]
    batch = BatchedDataDict({"input_ids": torch.tensor([[1, 5, 14, 6, 17]] * 5)})
    batch["input_lengths"] = torch.full((5,), 5)
    output = generator.generate(batch)
    assert output["output_ids"].shape[0] == 5
    assert (output["output_ids"] == output["output_ids"][0]).all()  # at temperature 0


def generation() -> None:
    """An engine completes a prompt at a temperature."""
    import torch

    from nemo_rl_core.distributed import BatchedDataDict

    output = run("004_L290", {"torch": torch, "BatchedDataDict": BatchedDataDict})["output"]
    assert output["output_ids"][0, :4].tolist() == [1, 2, 3, 4]
    assert 1 <= int(output["generation_lengths"][0]) <= 100


def megatron() -> None:
    """Eight ranks, two tensor-parallel in each of four pipeline stages, generate and train."""
    import torch

    from nemo_rl_core.algorithms import GRPOLossFn
    from nemo_rl_core.distributed import BatchedDataDict

    columns = {"input_ids": torch.tensor([[1, 5, 6, 7], [1, 8, 9, 5]])}
    columns["attention_mask"] = torch.ones(2, 4, dtype=torch.long)
    columns["advantages"] = torch.ones(2)
    columns["generation_logprobs"] = torch.zeros(2, 3)
    names = {"batch": BatchedDataDict(columns), "GRPOLossFn": GRPOLossFn}
    after = run("004_L207", names)
    assert after["logprobs"]["logprobs"].shape == (2, 3)
    assert after["generations"].size == 2


CHECKS: dict[str, Callable[[], Any]] = {
    "000_L142": scaled,
    "001_L170": scaled,
    "000_L157": dpo,
    "001_L137": engines,
    "004_L290": generation,
    "004_L207": megatron,
}


if __name__ == "__main__":
    import ray

    from nemo_rl_core.config.model import ModelFromConfig
    from nemo_rl_core.converters.materialize import materialize

    folder = Path(sys.argv[2])
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_layers": 4}
    materialize(ModelFromConfig(**sizes, max_position_embeddings=4096), folder / "tiny", seed=0)
    make_folders(folder, folder / "tiny")
    ray.init(num_cpus=16, num_gpus=16, include_dashboard=False)
    os.chdir(folder)
    CHECKS[sys.argv[1]]()
    sys.stdout.write(f"{sys.argv[1]} succeeded\n")
