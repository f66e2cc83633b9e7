"""GPUs, fake ones, of engines and scoring models on dedicated bundles."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

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
from nemo_rl_core.config.placement import DedicatedBundles
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

results = {"trainer": started("training", 2)[0]}
# An engine of two ranks: one GPU of the trainer's machine stays free, because it fits no engine.
two = DedicatedBundles("generation", 2, ranks_per_engine=2)
three = DedicatedBundles("generation", 3)
results["engine"], _ = started("generation", 2, cluster=session.dedicated_cluster(two))
results["again"] = started("generation", 2, cluster=session.dedicated_cluster(two))
# Other bundles are released first: otherwise three more GPUs would not be available.
results["three"] = started("generation", 3, cluster=session.dedicated_cluster(three))[0]
results["colocated"] = started("generation", 1)[0]
workers = EnvironmentWorkers(num_workers=3, rows_per_call=1)
for name, bundles in (("models", session.cluster), ("functions", None)):
    pool = ActorPool(Scorer, None, workers, bundles=bundles)
    results[name] = pool.run(range(12))
    pool.close()
    results[name + " again"] = pool.run(range(12))  # by other actors, in the same shares
    pool.close()
rows = [Rollout(Prompt("", "", (), "", ""), Completion((), (), False), "") for _ in range(6)]
for name, bundles in (("released", session.cluster), ("kept", None)):
    remote = RemoteScorer(make_counting, workers, bundles=bundles)
    results[name] = [remote.score(rows) for _ in range(3)]
    remote.close()
results["devices of trainer"] = started("training", 2, "device")[0]
results["devices of engine"] = started("split", 2, "device", env_vars=SEES_ALL_GPUS)[0]
try:
    started("generation", 6, cluster=session.dedicated_cluster(DedicatedBundles("generation", 6)))
except ResourceError as error:
    results["refused"] = str(error)

# Scoring models on GPUs that neither trainer nor engines use.
judge, model = DedicatedBundles("judge", 1), DedicatedBundles("reward-model", 1)
session.reserve_dedicated([two, judge, model])

def scored_beside(name):
    placed = {}
    placed["engine"], is_new = started("generation", 2, cluster=session.dedicated_cluster(two))
    placed["judge"] = started("judge", 1, cluster=session.dedicated_cluster(judge))[0]
    pool = ActorPool(Scorer, None, EnvironmentWorkers(), bundles=session.dedicated_cluster(model))
    placed["model"] = pool.run([0])
    pool.close()
    results[name] = placed

scored_beside("own scorers")
# A stage that needs some of them keeps all; one that needs others releases them first.
session.reserve_dedicated([two])
scored_beside("own scorers again")
session.reserve_dedicated([DedicatedBundles("reward-model", 4)])
pool = ActorPool(
    Scorer,
    None,
    EnvironmentWorkers(num_workers=4, rows_per_call=1),
    bundles=session.dedicated_cluster(DedicatedBundles("reward-model", 4)),
)
results["four models"] = pool.run(range(24))
pool.close()
bundles = session.dedicated_cluster(DedicatedBundles("reward-model", 4))
remote = RemoteScorer(make_counting, workers, bundles=bundles, is_dedicated=True)
results["stays"] = [remote.score(rows) for _ in range(3)]
remote.close()
print("FOUND " + json.dumps(results))
session.shutdown()
ray.shutdown()
machines.shutdown()
"""


@pytest.fixture(scope="module")
def results() -> dict[str, list[list[str]]]:
    # A cluster of several machines writes its address where every `ray.init` of this machine
    # looks for one; a separate folder keeps it private. Its path is short, as socket names must be.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "RAY_TMPDIR": folder},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    loaded: dict[str, list[list[str]]] = json.loads(lines[0].removeprefix("FOUND "))
    return loaded


def test_engines_get_gpus_that_the_trainer_does_not_use(
    results: dict[str, list[list[str]]],
) -> None:
    trainer, engine = ({tuple(each) for each in results[name]} for name in ("trainer", "engine"))
    assert (len(trainer), len(engine)) == (2, 2)
    assert not trainer & engine
    # The ranks of an engine share a machine, here not the trainer's.
    (of_trainer,), (of_engine,) = ({node for node, _ in each} for each in (trainer, engine))
    assert of_trainer != of_engine


def test_running_engines_are_reused_or_replaced(
    results: dict[str, list[list[str]]],
) -> None:
    again, is_new = results["again"]
    assert (again, is_new) == (results["engine"], False)
    assert len({tuple(each) for each in results["trainer"] + results["three"]}) == 5
    assert results["colocated"] == results["trainer"][:1]


def test_gpus_that_do_not_exist_are_refused_at_once(results: dict[str, list[list[str]]]) -> None:
    assert "GPU" in str(results["refused"])


def test_ranks_of_an_engine_see_all_gpus_and_compute_on_that_of_their_bundle(
    results: dict[str, list[list[str]]],
) -> None:
    of_trainer, of_engine = results["devices of trainer"], results["devices of engine"]
    assert [node for node, *_ in of_engine] == [node for node, *_ in of_trainer]
    for (_, visible, gpu, device), (_, seen, same_gpu, own_device) in zip(
        of_trainer, of_engine, strict=True
    ):
        # Weights go by CUDA IPC if both ends have one GPU; so they must agree on which one it is.
        assert (visible, device) == (gpu, "cuda:0")
        assert (seen, same_gpu, own_device) == (None, gpu, f"cuda:{gpu}")


def test_scorers_with_a_model_get_a_share_of_the_trainers_gpus_and_others_see_none(
    results: dict[str, list[list[str]]],
) -> None:
    trainer = {tuple(each) for each in results["trainer"]}
    for name in ("models", "models again"):
        assert {tuple(each) for each in results[name]} == trainer
    for name in ("functions", "functions again"):
        assert {gpu for _, gpu in results[name]} == {""}


def test_scorers_leave_the_gpu_after_scoring(results: dict[str, list[list[float]]]) -> None:
    assert results["released"] == [[0.0] * 6, [1.0] * 6, [2.0] * 6]
    assert results["kept"] == [[0.0] * 6] * 3


@pytest.mark.parametrize("name", ["own scorers", "own scorers again"])
def test_models_that_score_get_gpus_that_nobody_else_uses(
    name: str, results: dict[str, Any]
) -> None:
    placed = results[name]
    assert {group: len(each) for group, each in placed.items()} == {
        "engine": 2,
        "judge": 1,
        "model": 1,
    }
    used = [tuple(each) for group in placed.values() for each in group]
    used += [tuple(each) for each in results["trainer"]]
    assert len(set(used)) == 6
    assert all(gpu in ("0", "1", "2") for _, gpu in used)
    # The engine's ranks come first and share a machine.
    assert len({node for node, _ in placed["engine"]}) == 1


def test_a_stage_with_other_scorers_reuses_the_gpus_of_earlier_ones(
    results: dict[str, Any],
) -> None:
    assert results["own scorers again"]["engine"] == results["own scorers"]["engine"]
    of_trainer = {tuple(each) for each in results["trainer"]}
    four = {tuple(each) for each in results["four models"]}
    assert len(four) == 4
    assert not four & of_trainer


def test_models_on_dedicated_gpus_stay_there(results: dict[str, list[list[float]]]) -> None:
    assert results["stays"] == [[0.0] * 6] * 3
