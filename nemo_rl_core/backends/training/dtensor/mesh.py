"""Which rank does what: the axes of a `DTensorTraining`, and sums over its data ranks."""

import os
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.process_group import join_process_group, world_size
from nemo_rl_core.errors import ConfigError


@dataclass(frozen=True)
class RankMesh:
    """The ranks as a grid, `rank = (data * context_size + context) * tensor_size + tensor`.

    Attributes:
        parameters: Axes `replica`, `shard` and `tensor`: how weights are spread. Ranks of the
            context axis hold shards as data ranks do, so `shard` counts both.
        tokens: Axes `data`, `context` and `tensor`: how rows and their tokens are spread.
        row_multiple: What the length of every row must be a multiple of, to be split evenly.
    """

    parameters: DeviceMesh
    tokens: DeviceMesh
    row_multiple: int

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks with other rows."""
        return self.tokens["data"].get_group()

    @property
    def context_group(self) -> dist.ProcessGroup:
        """Ranks with other tokens of the same rows."""
        return self.tokens["context"].get_group()

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """Ranks with other columns of the same layers."""
        return self.tokens["tensor"].get_group()

    @property
    def context_size(self) -> int:
        """Ranks of context parallelism."""
        return self.tokens["context"].size()

    @property
    def tensor_size(self) -> int:
        """Ranks of tensor parallelism."""
        return self.tokens["tensor"].size()

    def data_max(self, value: int) -> int:
        """The largest value of any data rank; a collective."""
        largest = torch.tensor(value, device=self.tokens.device_type)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.data_group)
        return int(largest)

    def data_sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over data ranks; a collective."""
        total = values.detach().to(self.tokens.device_type, copy=True)
        dist.all_reduce(total, group=self.data_group)
        return total.to(values.device)

    def sum_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics summed over data ranks by name; a rank may lack some. A collective."""
        parts: list[dict[str, float] | None] = [None] * dist.get_world_size(self.data_group)
        dist.all_gather_object(parts, metrics, group=self.data_group)
        totals: Counter[str] = Counter()
        for part in parts:
            totals.update(part or {})
        return dict(totals)


def local_device() -> torch.device:
    """Where this rank computes: its own GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A worker often sees its own GPU alone, whatever its rank on the machine.
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def join_mesh(training: DTensorTraining) -> RankMesh | None:
    """Joins the other ranks and lays the grid; None where one rank trains whole weights.

    Raises:
        ConfigError: If the number of ranks is not a multiple of what one replica needs.
    """
    num_ranks = world_size()
    check_sizes(training, num_ranks)
    if num_ranks == 1 and not training.cpu_offload:
        return None
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join_process_group()
    replicas, tensor = training.data_parallel_replicas, training.tensor_parallel_size
    ranks = torch.arange(num_ranks)
    return RankMesh(
        parameters=DeviceMesh(
            device.type,
            ranks.view(replicas, -1, tensor),
            mesh_dim_names=("replica", "shard", "tensor"),
        ),
        tokens=DeviceMesh(
            device.type,
            ranks.view(-1, training.context_parallel_size, tensor),
            mesh_dim_names=("data", "context", "tensor"),
        ),
        row_multiple=training.context_parallel_size * (tensor if training.sequence_parallel else 1),
    )


def check_sizes(training: DTensorTraining, num_ranks: int) -> None:
    """Refuses axes that do not divide the ranks.

    Raises:
        ConfigError: Naming the sizes.
    """
    needed = training.ranks_per_replica * training.data_parallel_replicas
    if num_ranks % needed:
        raise ConfigError(
            "the ranks cannot be laid out over the axes of training",
            expected=f"a multiple of {needed} ranks: tensor_parallel_size "
            f"{training.tensor_parallel_size} x context_parallel_size "
            f"{training.context_parallel_size} x data_parallel_replicas "
            f"{training.data_parallel_replicas}",
            got=f"{num_ranks} ranks",
            fix="change the sizes, or the cluster's shape",
        )
