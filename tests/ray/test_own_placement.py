"""Engines on bundles of their own: which GPUs and machines they get, on machines with fake GPUs."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json
import ray
from ray.cluster_utils import Cluster

class Probe:
    def where(self):
        import os, ray
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
for _ in range(2):
    machines.add_node(num_cpus=4, num_gpus=3)
machines.connect()

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ResourceError

config = ClusterConfig(shape="cluster", num_workers=2, num_gpus_per_node=3)
session = ClusterSession.of(config)

def started(name, count, **options):
    sharding = NamedSharding(range(count), ["rank"])
    group, is_new = session.workers(Probe, name=name, key="", sharding=sharding, **options)
    return group.run_all_workers_single_data("where"), is_new

found = {"trainer": started("training", 2)[0]}
# An engine of two ranks: one GPU of the trainer's machine stays free, for it holds no engine.
found["engine"], _ = started("generation", 2, cluster=session.beside(2, ranks_per_engine=2))
found["again"] = started("generation", 2, cluster=session.beside(2, ranks_per_engine=2))
# Others than these give them back first: else three more GPUs would not be there.
found["three"] = started("generation", 3, cluster=session.beside(3, ranks_per_engine=1))[0]
found["colocated"] = started("generation", 1)[0]
try:
    started("generation", 6, cluster=session.beside(6, ranks_per_engine=1))
except ResourceError as error:
    found["refused"] = str(error)
print("FOUND " + json.dumps(found))
session.shutdown()
ray.shutdown()
machines.shutdown()
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[list[str]]]:
    # A cluster of several machines writes its address where every `ray.init` of this machine looks
    # for one; elsewhere only its own do. Short, for the names of its sockets are bounded.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as place:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "RAY_TMPDIR": place},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    loaded: dict[str, list[list[str]]] = json.loads(lines[0].removeprefix("FOUND "))
    return loaded


def test_engines_get_gpus_that_the_trainer_does_not_use(found: dict[str, list[list[str]]]) -> None:
    trainer, engine = ({tuple(each) for each in found[name]} for name in ("trainer", "engine"))
    assert (len(trainer), len(engine)) == (2, 2)
    assert not trainer & engine
    # The ranks of an engine share a machine, here not the trainer's.
    (of_trainer,), (of_engine,) = ({node for node, _ in each} for each in (trainer, engine))
    assert of_trainer != of_engine


def test_running_engines_are_reused_and_others_take_their_place(
    found: dict[str, list[list[str]]],
) -> None:
    again, is_new = found["again"]
    assert (again, is_new) == (found["engine"], False)
    assert len({tuple(each) for each in found["trainer"] + found["three"]}) == 5
    assert found["colocated"] == found["trainer"][:1]


def test_gpus_that_do_not_exist_are_refused_at_once(found: dict[str, list[list[str]]]) -> None:
    assert "GPU" in str(found["refused"])
