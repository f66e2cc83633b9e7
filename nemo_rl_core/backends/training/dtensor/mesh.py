"""Mesh of ranks over the axes of a `DTensorTraining`, and sums over its data ranks."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.collective_check import check_collectives
from nemo_rl_core.distributed.process_group import (
    collective_timeout,
    join_process_group,
    local_device,
    world_size,
)
from nemo_rl_core.errors import ConfigError


@dataclass(frozen=True)
class RankMesh:
    """The ranks as a grid, `rank = (data * context_size + context) * tensor_size + tensor`.

    Attributes:
        parameters: Mesh that shards the weights, with axes `replica`, `shard` and `tensor`. Context
            ranks have shards like data ranks, so `shard` includes both.
        tokens: Mesh that distributes rows and tokens, with axes `data`, `context` and `tensor`.
        row_multiple: Divisor of the length of packed rows, so that ranks get parts of equal length.
    """

    parameters: DeviceMesh
    tokens: DeviceMesh
    row_multiple: int

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks that hold different rows, including this one."""
        return self.tokens["data"].get_group()

    @property
    def context_group(self) -> dist.ProcessGroup:
        """Ranks that hold different tokens of the same rows, including this one."""
        return self.tokens["context"].get_group()

    @property
    def context_size(self) -> int:
        """Number of context-parallel ranks."""
        return self.tokens["context"].size()

    def data_max(self, value: int) -> int:
        """Returns the largest value of any data rank; a collective."""
        largest = torch.tensor(value, device=self.tokens.device_type)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.data_group)
        return int(largest)

    def data_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum over data ranks; a collective."""
        total = values.detach().to(self.tokens.device_type, copy=True)
        dist.all_reduce(total, group=self.data_group)
        return total.to(values.device)

    def sum_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Sums metrics over data ranks by name; a collective. Ranks may have different metrics."""
        parts: list[dict[str, float] | None] = [None] * dist.get_world_size(self.data_group)
        dist.all_gather_object(parts, metrics, group=self.data_group)
        totals: Counter[str] = Counter()
        for part in parts:
            totals.update(part or {})
        return dict(totals)


def join_mesh(training: DTensorTraining) -> RankMesh | None:
    """Joins the process group and builds the mesh; None if one rank trains unsharded weights."""
    num_ranks = world_size()
    check_sizes(training, num_ranks)
    if num_ranks == 1 and not training.cpu_offload:
        return None
    join_process_group()
    check_collectives({})  # the world first: creating the groups of the axes is a collective
    replicas, tensor = training.num_copies, training.tensor_parallel_size
    context = training.context_parallel_size
    parameters, tokens = _grids(dist.group.WORLD, local_device().type, replicas, context, tensor)
    grids = (parameters, tokens)
    check_collectives({n: grid[n].get_group() for grid in grids for n in grid.mesh_dim_names or ()})
    row_multiple = context * (tensor if training.sequence_parallel else 1)
    return RankMesh(parameters, tokens, row_multiple)


@cache
def _grids(
    world: dist.ProcessGroup, device_type: str, replicas: int, context: int, tensor: int
) -> tuple[DeviceMesh, DeviceMesh]:
    """Returns the meshes `RankMesh.parameters` and `RankMesh.tokens`.

    Cached, since workers are set up again for every stage, but the process groups of a mesh, with
    their connections, threads and buffers, exist until the process ends.
    """
    ranks = torch.arange(world.size())
    parameters, tokens = ranks.view(replicas, -1, tensor), ranks.view(-1, context, tensor)
    return (
        _grid(device_type, parameters, ("replica", "shard", "tensor")),
        _grid(device_type, tokens, ("data", "context", "tensor")),
    )


def _grid(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """Creates a mesh whose groups have the timeout of collectives, which `DeviceMesh` ignores."""
    groups = [_axis_group(ranks, axis) for axis in range(ranks.ndim)]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)


def _axis_group(ranks: torch.Tensor, axis: int) -> dist.ProcessGroup:
    """Returns this rank's group along an axis; all ranks create all groups in the same order."""
    lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    if len(lines) == 1 and dist.group.WORLD is not None:
        return dist.group.WORLD
    rank_group = None
    for line in lines:
        group = dist.new_group(line, timeout=collective_timeout())
        if dist.get_rank() in line:
            rank_group = group
    assert isinstance(rank_group, dist.ProcessGroup)
    return rank_group


def check_sizes(training: DTensorTraining, num_ranks: int) -> None:
    """Raises `ConfigError` if the axes do not divide the ranks."""
    needed = training.smallest_world_size
    if num_ranks % needed:
        raise ConfigError(
            "the ranks cannot be laid out over the axes of training",
            expected=f"a multiple of {needed} ranks: tensor_parallel_size "
            f"{training.tensor_parallel_size} x context_parallel_size "
            f"{training.context_parallel_size} x data_parallel_replicas "
            f"{training.num_copies}",
            got=f"{num_ranks} ranks",
            fix="change the sizes, or the cluster's shape",
        )
