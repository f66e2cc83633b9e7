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
        parameters: Axes `replica`, `shard` and `tensor`: sharding of weights. Context ranks hold
            shards like data ranks, so `shard` counts both.
        tokens: Axes `data`, `context` and `tensor`: distribution of rows and tokens.
        row_multiple: Divisor of every row length, for an even split.
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


def join_mesh(training: DTensorTraining) -> RankMesh | None:
    """Joins the process group and builds the mesh; None if one rank trains whole weights.

    Raises:
        ConfigError: If the number of ranks is not a multiple of a replica's ranks.
    """
    num_ranks = world_size()
    check_sizes(training, num_ranks)
    if num_ranks == 1 and not training.cpu_offload:
        return None
    join_process_group()
    check_collectives({})  # first, since all ranks make the groups of the axes together
    replicas, tensor = training.num_copies, training.tensor_parallel_size
    context = training.context_parallel_size
    parameters, tokens = _grids(dist.group.WORLD, local_device().type, replicas, context, tensor)
    check_collectives(_named_groups(parameters, tokens))
    row_multiple = context * (tensor if training.sequence_parallel else 1)
    return RankMesh(parameters, tokens, row_multiple)


def _named_groups(*grids: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """The group of this rank on each axis."""
    return {name: grid[name].get_group() for grid in grids for name in grid.mesh_dim_names or ()}


@cache
def _grids(
    world: dist.ProcessGroup, device_type: str, replicas: int, context: int, tensor: int
) -> tuple[DeviceMesh, DeviceMesh]:
    """The meshes `RankMesh.parameters` and `RankMesh.tokens`.

    Cached, since workers are set up again for every stage, and the process groups of a mesh, with
    their connections, threads and buffers, exist until the process ends.
    """
    ranks = torch.arange(world.size())
    parameters, tokens = ranks.view(replicas, -1, tensor), ranks.view(-1, context, tensor)
    return (
        _grid(device_type, parameters, ("replica", "shard", "tensor")),
        _grid(device_type, tokens, ("data", "context", "tensor")),
    )


def _grid(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh whose groups have the timeout of collectives, which `DeviceMesh` itself takes not."""
    groups = [_axis_group(ranks, axis) for axis in range(ranks.ndim)]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)


def _axis_group(ranks: torch.Tensor, axis: int) -> dist.ProcessGroup:
    """The group of this rank along an axis; all ranks make all groups of the axis, in one order."""
    lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    if len(lines) == 1 and dist.group.WORLD is not None:
        return dist.group.WORLD
    found = None
    for line in lines:
        group = dist.new_group(line, timeout=collective_timeout())
        if dist.get_rank() in line:
            found = group
    assert isinstance(found, dist.ProcessGroup)
    return found


def check_sizes(training: DTensorTraining, num_ranks: int) -> None:
    """Raises if the axes do not divide the ranks.

    Raises:
        ConfigError: Names the sizes.
    """
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
