"""Several real ranks in Ray: they meet, share data by their axes, and fail together."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nemo_rl_core.distributed.batched_data_dict import RemoteRows, read_blocks
from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.distributed.packing.row_shards import BlockParts
from nemo_rl_core.distributed.process_group import join_process_group, rank, world_size
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.worker_group import RayWorkerGroup
from nemo_rl_core.errors import ResourceError, WorkerError

pytestmark = pytest.mark.slow

GRID = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])


class Rank:
    """One of several ranks, with a collective."""

    def location(self) -> tuple[int, int, str]:
        return rank(), world_size(), os.environ["LOCAL_RANK"]

    def sum_of(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        join_process_group(timeout_seconds=60)
        total = torch.tensor(value)
        dist.all_reduce(total)
        return total.item()

    def total(self, rows: list[int], *, times: int = 1) -> tuple[int, int]:
        return rank(), times * sum(rows)

    def fail_on(self, failing: int, *, die: bool) -> float:
        if rank() == failing and die:
            os._exit(3)
        if rank() == failing:
            raise ValueError("no such row")
        return self.sum_of(1.0)  # waits there for the rank that failed


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayVirtualCluster]:
    # Four ranks on any number of cores: a hundredth each, since the session uses one of them.
    with RayVirtualCluster(
        [2, 2], use_gpus=False, max_colocated_worker_groups=3, num_cpus_per_bundle=0.01
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ranks(session: ClusterSession, cluster: RayVirtualCluster) -> Iterator[RayWorkerGroup]:
    workers = RayWorkerGroup(cluster, Rank, sharding=GRID)
    yield workers
    workers.shutdown()


def test_ranks_meet(ranks: RayWorkerGroup) -> None:
    locations = ranks.run_all_workers_single_data("location")
    assert locations == [(rank, 4, str(rank)) for rank in range(4)]
    totals = ranks.run_all_workers_sharded_data(
        "sum_of", in_sharded_axes=GRID.names, value=[[1.0, 2.0], [3.0, 4.0]]
    )
    assert totals == [10.0] * 4


def kept_total(worker: Rank, rows: Any, *, times: int) -> tuple[tuple[int, int], Any]:
    return worker.total(rows["x"].tolist(), times=times), rows


@pytest.mark.parametrize("axis", ["data_parallel", "tensor_parallel"])
@pytest.mark.parametrize("ends", [[[2, 5]], [[2], [3]]])
def test_neighbors_read_their_parts_of_one_stored_block(
    ranks: RayWorkerGroup, axis: str, ends: list[list[int]]
) -> None:
    """Rows of a block elsewhere; the other ranks at a coordinate read the same part."""
    import ray

    rows = RemoteRows.of_blocks([ray.put({"x": np.arange(1, 6)})], [5])
    starts = [0, 2]
    shared = [
        BlockParts({"x": np.arange(1, 6)[start:], "remote": rows[start:]}, np.array(inner))
        for start, inner in zip(starts, ends, strict=False)
    ]
    answers = ranks.run_all_workers_on_parts(
        kept_total, shared, axis=axis, common_kwargs={"times": 10}, num_remote=1
    )
    second = 2 if axis == "data_parallel" else 1
    assert [first for first, _ in answers] == [(0, 30), (second, 120)]
    kept = [
        block["remote"].fetched()["x"].tolist() for block in read_blocks([b for _, b in answers])
    ]
    assert kept == [[1, 2], [3, 4, 5]]


def test_shards_are_distributed_along_their_axis(ranks: RayWorkerGroup) -> None:
    def run(**axes: object) -> list[tuple[int, int]]:
        return ranks.run_all_workers_sharded_data("total", rows=[[1, 2], [3, 4, 5]], **axes)

    data, tensor = "data_parallel", "tensor_parallel"
    assert run(in_sharded_axes=[data], replicate_on_axes=[tensor]) == [
        (0, 3),
        (1, 3),
        (2, 12),
        (3, 12),
    ]
    assert run(
        in_sharded_axes=[data],
        replicate_on_axes=[tensor],
        output_is_replicated=[tensor],
        common_kwargs={"times": 10},
    ) == [(0, 30), (2, 120)]
    # Only the first coordinate of the unnamed axis takes part.
    assert run(in_sharded_axes=[data]) == [(0, 3), (2, 12)]
    assert run(in_sharded_axes=[tensor]) == [(0, 3), (1, 12)]
    by_both = [[[1], [2]], [[3], [4]]]
    answers = ranks.run_all_workers_sharded_data(
        "total", in_sharded_axes=[data, tensor], rows=by_both
    )
    assert answers == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize("die", [False, True])
def test_the_rank_that_failed_is_named_not_those_it_left_waiting(
    cluster: RayVirtualCluster, die: bool
) -> None:
    workers = RayWorkerGroup(cluster, Rank, name="pair", num_workers=2)
    assert workers.run_all_workers_single_data("sum_of", 1.0) == [2.0, 2.0]
    message = "worker 1 of 'pair' " + ("died" if die else "raised ValueError: no such row")
    with pytest.raises(WorkerError, match=message):
        workers.run_all_workers_single_data("fail_on", 1, die=die)
    assert workers.is_broken
    workers.shutdown()


def test_groups_that_do_not_fit_are_refused(cluster: RayVirtualCluster) -> None:
    with pytest.raises(ResourceError, match="'Rank' does not fit its cluster"):
        RayWorkerGroup(cluster, Rank, num_workers=5)
    with pytest.raises(ResourceError, match="over at most 4 bundles"):
        RayWorkerGroup(cluster, Rank, sharding=GRID, num_workers=2)


def test_ports_differ_from_group_to_group(cluster: RayVirtualCluster) -> None:
    addresses = {cluster.get_master_address_and_port() for _ in range(3)}
    assert len(addresses) == 3
    assert all(20_000 <= port < 32_000 for _, port in addresses)
