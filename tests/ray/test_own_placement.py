"""Engines and models that score on bundles of their own: which GPUs, fake ones, they get."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

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

    def device(self):
        import os, ray, torch
        from nemo_rl_core.distributed.process_group import local_device, own_gpu
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 3
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        node = ray.get_runtime_context().get_node_id()
        return node, visible, own_gpu(), str(local_device())

class Scorer:
    def __init__(self, make):
        pass
    def start(self):
        pass
    def run(self, rows):
        import os, ray, time
        time.sleep(0.1)
        node = ray.get_runtime_context().get_node_id()
        return [(node, os.environ.get("CUDA_VISIBLE_DEVICES"))] * len(rows)
    def close(self):
        pass

def make_counting():
    from nemo_rl_core.environments.interfaces import Scorer

    class Counting(Scorer):
        num_released = 0
        def score(self, rollouts):
            return [float(self.num_released)] * len(rollouts)
        def release_memory(self):
            self.num_released += 1

    return Counting()

machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
for _ in range(2):
    machines.add_node(num_cpus=4, num_gpus=3)
machines.connect()

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.environment import EnvironmentWorkers
from nemo_rl_core.config.placement import OwnBundles
from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.worker_group import SEES_ALL_GPUS
from nemo_rl_core.environments.actor_pool import ActorPool
from nemo_rl_core.environments.remote import RemoteScorer
from nemo_rl_core.errors import ResourceError
from nemo_rl_core.types import Completion, Prompt, Rollout

config = ClusterConfig(shape="cluster", num_workers=2, num_gpus_per_node=3)
session = ClusterSession.of(config)

def started(name, count, method="where", **options):
    sharding = NamedSharding(range(count), ["rank"])
    group, is_new = session.workers(Probe, name=name, key="", sharding=sharding, **options)
    return group.run_all_workers_single_data(method), is_new

found = {"trainer": started("training", 2)[0]}
# An engine of two ranks: one GPU of the trainer's machine stays free, for it holds no engine.
two, three = OwnBundles("generation", 2, ranks_per_engine=2), OwnBundles("generation", 3)
found["engine"], _ = started("generation", 2, cluster=session.beside(two))
found["again"] = started("generation", 2, cluster=session.beside(two))
# Others than these give them back first: else three more GPUs would not be there.
found["three"] = started("generation", 3, cluster=session.beside(three))[0]
found["colocated"] = started("generation", 1)[0]
workers = EnvironmentWorkers(num_workers=3, rows_per_call=1)
for name, bundles in (("models", session.cluster), ("functions", None)):
    pool = ActorPool(Scorer, None, workers, bundles=bundles)
    found[name] = pool.run(range(12))
    pool.close()
    found[name + " again"] = pool.run(range(12))  # by others, in the same shares
    pool.close()
rows = [Rollout(Prompt("", "", (), "", ""), Completion((), (), False), "") for _ in range(6)]
for name, bundles in (("released", session.cluster), ("kept", None)):
    remote = RemoteScorer(make_counting, workers, bundles=bundles)
    found[name] = [remote.score(rows) for _ in range(3)]
    remote.close()
found["devices of trainer"] = started("training", 2, "device")[0]
found["devices of engine"] = started("split", 2, "device", env_vars=SEES_ALL_GPUS)[0]
try:
    started("generation", 6, cluster=session.beside(OwnBundles("generation", 6)))
except ResourceError as error:
    found["refused"] = str(error)

# Models that score, on GPUs that neither trainer nor engines use.
judge, model = OwnBundles("judge", 1), OwnBundles("reward-model", 1)
session.reserve_beside([two, judge, model])

def scored_beside(name):
    placed = {}
    placed["engine"], is_new = started("generation", 2, cluster=session.beside(two))
    placed["judge"] = started("judge", 1, cluster=session.beside(judge))[0]
    pool = ActorPool(Scorer, None, EnvironmentWorkers(), bundles=session.beside(model))
    placed["model"] = pool.run([0])
    pool.close()
    found[name] = placed

scored_beside("own scorers")
# A stage with some of it keeps all; one with others gives theirs back first.
session.reserve_beside([two])
scored_beside("own scorers again")
session.reserve_beside([OwnBundles("reward-model", 4)])
pool = ActorPool(
    Scorer,
    None,
    EnvironmentWorkers(num_workers=4, rows_per_call=1),
    bundles=session.beside(OwnBundles("reward-model", 4)),
)
found["four models"] = pool.run(range(24))
pool.close()
bundles = session.beside(OwnBundles("reward-model", 4))
remote = RemoteScorer(make_counting, workers, bundles=bundles, are_own=True)
found["stays"] = [remote.score(rows) for _ in range(3)]
remote.close()
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


def test_ranks_of_an_engine_see_all_gpus_and_compute_on_that_of_their_bundle(
    found: dict[str, list[list[str]]],
) -> None:
    of_trainer, of_engine = found["devices of trainer"], found["devices of engine"]
    assert [node for node, *_ in of_engine] == [node for node, *_ in of_trainer]
    for (_, visible, gpu, device), (_, seen, same_gpu, own_device) in zip(
        of_trainer, of_engine, strict=True
    ):
        # Weights go by CUDA IPC where both ends have one GPU; so they must agree on which it is.
        assert (visible, device) == (gpu, "cuda:0")
        assert (seen, same_gpu, own_device) == (None, gpu, f"cuda:{gpu}")


def test_scorers_with_a_model_get_a_share_of_the_trainers_gpus_and_others_see_none(
    found: dict[str, list[list[str]]],
) -> None:
    trainer = {tuple(each) for each in found["trainer"]}
    for name in ("models", "models again"):
        assert {tuple(each) for each in found[name]} == trainer
    for name in ("functions", "functions again"):
        assert {gpu for _, gpu in found[name]} == {""}


def test_scorers_leave_the_gpu_when_all_is_scored(found: dict[str, list[list[float]]]) -> None:
    assert found["released"] == [[0.0] * 6, [1.0] * 6, [2.0] * 6]
    assert found["kept"] == [[0.0] * 6] * 3


@pytest.mark.parametrize("name", ["own scorers", "own scorers again"])
def test_models_that_score_get_gpus_that_nobody_else_uses(name: str, found: dict[str, Any]) -> None:
    placed = found[name]
    assert {group: len(each) for group, each in placed.items()} == {
        "engine": 2,
        "judge": 1,
        "model": 1,
    }
    used = [tuple(each) for group in placed.values() for each in group]
    used += [tuple(each) for each in found["trainer"]]
    assert len(set(used)) == 6
    assert all(gpu in ("0", "1", "2") for _, gpu in used)
    # The engine's ranks come first, and share a machine.
    assert len({node for node, _ in placed["engine"]}) == 1


def test_a_stage_with_other_scorers_gets_the_gpus_of_those_before(found: dict[str, Any]) -> None:
    assert found["own scorers again"]["engine"] == found["own scorers"]["engine"]
    of_trainer = {tuple(each) for each in found["trainer"]}
    four = {tuple(each) for each in found["four models"]}
    assert len(four) == 4
    assert not four & of_trainer


def test_models_on_gpus_of_their_own_stay_there(found: dict[str, list[list[float]]]) -> None:
    assert found["stays"] == [[0.0] * 6] * 3
