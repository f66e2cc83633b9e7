"""Transfers over machines whose GPUs Ray only counts: each rank sends to its GPU."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

PROGRAM = """
import json
import os

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from nemo_rl_core.distributed.weight_sync import link
from nemo_rl_core.distributed.weight_sync.link import ReceivesWeights, SendsWeights, WeightLink
from nemo_rl_core.distributed.weight_sync.routes import Location

BUCKET_BYTES = 4096


def simulate():
    from tests.simulated_gpus import SimulatedIpc, SimulatedNccl, simulate_transports

    context = ray.get_runtime_context()
    here = Location(context.get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"])
    link.current_location = lambda: here
    SimulatedIpc.bucket_bytes = SimulatedNccl.bucket_bytes = BUCKET_BYTES
    simulate_transports(pytest.MonkeyPatch())
    return here


class Trainer(SendsWeights):
    def __init__(self):
        self.here, self.step = simulate(), 1

    def location(self):
        return [self.here.machine, self.here.gpu, os.getpid()]

    def change(self, step):
        self.step = step

    def named_weights(self):
        yield "embedding", torch.arange(5000.0) * self.step
        for number in range(8):
            yield f"layer {number}", torch.full((300,), float(number + self.step))

    def endpoints(self):
        return [each._transport.most_bytes for each in (self._endpoints or {}).values()]


class Engine(ReceivesWeights):
    def __init__(self):
        self.here = simulate()

    def take_weights(self, named_tensors):
        self.taken = dict(named_tensors)

    def has(self, step):
        sent = torch.arange(5000.0) * step
        return len(self.taken) == 9 and torch.equal(self.taken["embedding"], sent)

    def location(self):
        from tests.simulated_gpus import SimulatedIpc

        return [self.here.machine, self.here.gpu, sorted(SimulatedIpc.mapped_from)]


machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
for _ in range(2):
    machines.add_node(num_cpus=8, num_gpus=3)
machines.connect()

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ConsistencyError

session = ClusterSession.of(ClusterConfig(shape="cluster", num_workers=4, num_gpus_per_node=3))


def started(kind, name, count, **options):
    sharding = NamedSharding(range(count), ["rank"])
    return session.workers(kind, name=name, key="", sharding=sharding, **options)[0]


def ask(group, method, *args):
    return group.run_all_workers_single_data(method, *args)


trainer = started(Trainer, "training", 4)
results = {"trainer": ask(trainer, "location")}
for name, count, options in (
    ("colocated", 4, {}),
    ("own", 2, {"cluster": session.dedicated_cluster(DedicatedBundles("generation", 2))}),
):
    engine = started(Engine, name, count, **options)
    for step in (1, 2):
        ask(trainer, "change", step)
        way = WeightLink.between(trainer, engine, timeout_seconds=120)
        way.transfer()
        assert ask(engine, "has", step) == [True] * count
    results[name] = ask(engine, "location")
    results[name + " routes"] = [
        [spec.sender, spec.transport, spec.num_receivers] for spec in way.specs.values()
    ]
    results[name + " endpoints"] = ask(trainer, "endpoints")
    if name == "colocated":
        trainer.run_single_worker("change", 3, rank=2)
        try:
            way.transfer()
        except ConsistencyError as error:
            results["refused"] = error.problem
        results["links left"] = len(WeightLink.by_engine)
    else:
        way.close()
        results["closed"] = ask(trainer, "endpoints")
print("FOUND " + json.dumps(results))
session.shutdown()
ray.shutdown()
machines.shutdown()
"""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    # See tests/ray/test_dedicated_placement.py.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
            env={**os.environ, "RAY_TMPDIR": folder},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    loaded: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    return loaded


def test_each_rank_sends_to_the_engine_on_its_gpu(results: dict[str, Any]) -> None:
    assert len({tuple(location[:2]) for location in results["trainer"]}) == 4
    assert len({location[0] for location in results["trainer"]}) == 2
    assert results["colocated routes"] == [[rank, "cuda_ipc", 1] for rank in range(4)]
    # An engine has mapped only the memory of the trainer's rank on its GPU.
    of_location = {(machine, gpu): pid for machine, gpu, pid in results["trainer"]}
    for machine, gpu, mapped in results["colocated"]:
        assert mapped == [of_location[machine, gpu]]
    assert results["colocated endpoints"] == [[2 * 4096]] * 4


def test_dedicated_engines_receive_one_broadcast(results: dict[str, Any]) -> None:
    assert results["own routes"] == [[0, "nccl", 2]]
    assert all(mapped == [] for *_, mapped in results["own"])
    assert results["own endpoints"] == [[2 * 4096], [], [], []]
    assert results["closed"] == [[], [], [], []]


def test_ranks_that_have_sent_other_weights_are_named(results: dict[str, Any]) -> None:
    assert results["refused"].startswith("rank 2 of the trainer sent weights that differ")
    assert results["links left"] == 0
