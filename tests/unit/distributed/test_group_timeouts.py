"""`cluster.collective_timeout_seconds` applies to every group of ranks."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import TIMEOUT, join_process_group

ASKED = timedelta(seconds=77)


def timeouts_of_all_groups() -> dict[str, timedelta]:
    """Returns the timeout of each group's gloo backend, by description of the group."""
    from torch.distributed.distributed_c10d import _world

    return {
        f"{group.group_desc} {group.group_name}": group._get_backend(
            torch.device("cpu")
        ).options._timeout
        for group in _world.pg_map
    }


# Sizes, and groups of rank 3: rank = (data * context_size + context) * tensor_size + tensor.
MESHES: list[tuple[dict[str, Any], dict[str, list[int]]]] = [
    ({}, {"replica": [3], "shard": [0, 1, 2, 3], "data": [0, 1, 2, 3], "context": [3]}),
    (
        {"data_parallel_replicas": 2},
        {"replica": [1, 3], "shard": [2, 3], "data": [0, 1, 2, 3], "tensor": [3]},
    ),
    (
        {"tensor_parallel_size": 2, "data_parallel_replicas": 2},
        {"replica": [1, 3], "shard": [3], "tensor": [2, 3], "data": [1, 3]},
    ),
    (
        {"tensor_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
        {"shard": [1, 3], "tensor": [2, 3], "context": [1, 3], "data": [3]},
    ),
]


def of_meshes() -> tuple[dict[str, timedelta], list[dict[str, list[int]]]]:
    from nemo_rl_core.backends.training.dtensor.mesh import join_mesh

    os.environ[TIMEOUT] = f"{ASKED.total_seconds():g}"
    axes = []
    for sizes, expected in MESHES:
        mesh = join_mesh(DTensorTraining(**sizes))
        assert mesh is not None
        groups = {
            name: grid[name].get_group()
            for grid in (mesh.parameters, mesh.tokens)
            for name in grid.mesh_dim_names or ()
        }
        axes.append({name: dist.get_process_group_ranks(groups[name]) for name in expected})
    return timeouts_of_all_groups(), axes


@pytest.mark.slow
def test_every_axis_of_a_mesh_has_the_timeout() -> None:
    timeouts, axes = run_ranks(of_meshes, world_size=4)[3]
    assert set(timeouts.values()) == {ASKED}, timeouts
    assert axes == [expected for _, expected in MESHES]


def of_megatron() -> dict[str, timedelta]:
    from nemo_rl_core.backends.training.megatron.topology import initialize_topology

    os.environ[TIMEOUT] = f"{ASKED.total_seconds():g}"
    initialize_topology(MegatronTraining(tensor_parallel_size=2, pipeline_parallel_size=2))
    initialize_topology(MegatronTraining(context_parallel_size=2, expert_parallel_size=2))
    return timeouts_of_all_groups()


@pytest.mark.slow
def test_every_group_of_megatron_has_the_timeout() -> None:
    timeouts = run_ranks(of_megatron, world_size=4)[0]
    assert len(timeouts) > 20
    assert set(timeouts.values()) == {ASKED}, timeouts


def of_64_gpus() -> tuple[list[tuple[int, float]], dict[str, list[int]]]:
    """Returns size and timeout of each backend that torch creates for a grid of 64 GPUs."""
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from nemo_rl_core.backends.training.dtensor.mesh import _grids

    made: list[tuple[int, float]] = []

    def recorded(common: Any, _: Any) -> dist.ProcessGroup:
        made.append((common.group_size, common.timeout.total_seconds()))
        return FakeProcessGroup._create_internal(common.group_rank, common.group_size, None)

    for name in ("of_cpus", "of_gpus"):  # for gloo and NCCL, as every group has both
        dist.Backend.register_backend(name, recorded, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(
        "cpu:of_cpus,cuda:of_gpus", store=FakeStore(), rank=37, world_size=64, timeout=ASKED
    )
    os.environ[TIMEOUT] = f"{ASKED.total_seconds():g}"
    assert dist.group.WORLD is not None
    grids = _grids(dist.group.WORLD, "cuda", 4, 2, 4)
    return made, {
        name: dist.get_process_group_ranks(grid[name].get_group())
        for grid in grids
        for name in grid.mesh_dim_names or ()
    }


def test_groups_of_64_gpus_have_it_in_both_of_their_backends() -> None:
    ((made, axes),) = run_ranks(of_64_gpus, world_size=1)
    assert {seconds for _, seconds in made} == {77.0}
    # 37 = (data 4 * 2 + context 1) * 4 + tensor 1 = (replica 2 * 4 + shard 1) * 4 + tensor 1.
    assert axes == {
        "replica": [5, 21, 37, 53],
        "shard": [33, 37, 41, 45],
        "tensor": [36, 37, 38, 39],
        "data": [5, 13, 21, 29, 37, 45, 53, 61],
        "context": [33, 37],
    }
    sizes = [size for size, _ in made]
    assert sizes == [64] * 2 + [4] * 6 + [8] * 2 + [2] * 2 + [4] * 2


def test_no_timeout_is_ten_minutes() -> None:
    def found() -> timedelta:
        os.environ.pop(TIMEOUT, None)
        join_process_group()
        group = dist.group.WORLD
        assert group is not None
        return group._get_backend(torch.device("cpu")).options._timeout

    assert run_ranks(found, world_size=1) == [timedelta(minutes=10)]
