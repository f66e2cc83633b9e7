"""The RayJob that the stages of a run share: its manifest and its life."""

import json
import shlex
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.tools.translator import get_serializable

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.errors import ResourceError
from tasks.evaluate import evaluate
from tasks.pods import images
from tasks.pods.images import image_name
from tasks.pods.pods import NO_DRAIN
from tasks.pods.shapes import Shape, laptop, shape_of
from tasks.ray_cluster.experimental.run_cluster import IDLE_SECONDS, RunCluster, give_back
from tasks.ray_cluster.experimental.run_stage import RunStageTask
from tasks.train_sft import train_sft

pytestmark = pytest.mark.experimental

TASK = ["task-module", "tasks.evaluate", "task-name", "evaluate"]
NODE = shape_of(ClusterConfig(shape="node_8gpu"))
OWN_POD = {
    "metadata": {
        "name": "f1-n3-0",
        "labels": {"kueue.x-k8s.io/queue-name": "gpus", "task-name": "tasks-train-sft"},
        "ownerReferences": [
            {
                "apiVersion": "flyte.lyft.com/v1alpha1",
                "kind": "flyteworkflow",
                "name": "f1",
                "uid": "7-8-9",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    },
    "spec": {
        "serviceAccountName": "default",
        "imagePullSecrets": [{"name": "nemo-rl-registry"}],
        "containers": [
            {
                "name": "stage",
                "image": "registry/nemo-rl-training:1",
                "env": [
                    {"name": "NEMO_RL_POD_NAME", "valueFrom": {"fieldRef": {}}},
                    {"name": "FLYTE_AWS_ENDPOINT", "value": "https://s3"},
                    {"name": NO_DRAIN, "value": "0"},
                ],
                "envFrom": [
                    {"secretRef": {"name": "nemo-rl-secrets", "optional": True}},
                    {"secretRef": {"name": "of-the-site"}},
                ],
            }
        ],
    },
}


class Jobs:
    """Kubernetes with one name space: RayJobs by name, with the states that come, in order."""

    def __init__(self, *states: str) -> None:
        self._states: Iterator[str] = iter(states)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.lost_pods: set[str] = set()

    def own_pod(self) -> dict[str, Any]:
        return OWN_POD

    def ray_job(self, name: str) -> dict[str, Any] | None:
        if name not in self.jobs:
            return None
        state = next(self._states)
        if state == "gone":
            del self.jobs[name]
            return None
        job = json.loads(json.dumps(self.jobs[name]))
        if state == "Deleting":
            state, job["metadata"]["deletionTimestamp"] = "Running", "2026-01-01T00:00:00Z"
        status: dict[str, Any] = {"jobDeploymentStatus": state, "message": "no GPU is free"}
        status["rayClusterStatus"] = {"head": {"podName": f"head-{self.asked.count('create')}"}}
        return {**job, "status": {**status, "dashboardURL": "head-svc.flow.svc:8265"}}

    def ray_jobs(self, selector: str) -> list[str]:
        key, _, value = selector.partition("=")
        return [n for n, job in self.jobs.items() if job["metadata"]["labels"][key] == value]

    def has_pod(self, name: str) -> bool:
        return name not in self.lost_pods

    def create_ray_job(self, body: dict[str, Any]) -> None:
        self.asked.append("create")
        uid = f"uid-{self.asked.count('create')}"
        self.jobs[body["metadata"]["name"]] = {**body, "metadata": {**body["metadata"], "uid": uid}}

    def delete_ray_job(self, name: str, *, uid: str | None = None) -> None:
        self.asked.append("delete")
        assert uid in (None, self.jobs[name]["metadata"]["uid"])
        del self.jobs[name]


@pytest.fixture(autouse=True)
def execution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")


def cluster_of(shape: Shape) -> RunCluster:
    stage = evaluate.on_shape(shape).of_run()
    assert isinstance(stage, RunStageTask)
    return stage.cluster


def address(jobs: Jobs, **options: Any) -> str:
    return cluster_of(NODE).address(jobs, pause_seconds=0, **options)  # type: ignore[arg-type]


def test_the_first_stage_makes_the_cluster_and_others_find_it() -> None:
    jobs = Jobs("Initializing", "Running", "Running")
    assert address(jobs) == "head-svc.flow.svc:6379"
    assert address(jobs) == "head-svc.flow.svc:6379"
    assert jobs.asked == ["create"]


@pytest.mark.parametrize("ended", ["Complete", "Failed"])
def test_a_released_cluster_is_created_again(ended: str) -> None:
    jobs = Jobs("Running", ended, "Running")
    assert address(jobs) == address(jobs)
    assert jobs.asked == ["create", "delete", "create"]


def test_a_cluster_whose_head_is_gone_is_made_again() -> None:
    """KubeRay does not replace the head of a RayJob, and in this mode it stays `Running`."""
    jobs = Jobs("Running", "Running", "Running", "Running")
    address(jobs)
    address(jobs)
    assert jobs.asked == ["create"]
    jobs.lost_pods = {"head-1"}
    address(jobs)
    assert jobs.asked == ["create", "delete", "create"]


def test_a_cluster_that_is_being_removed_is_not_joined() -> None:
    jobs = Jobs("Running", "Deleting", "Deleting", "gone", "Running")
    address(jobs)
    address(jobs)
    assert jobs.asked == ["create", "create"]


def test_a_cluster_that_never_runs_is_an_error() -> None:
    with pytest.raises(ResourceError, match="does not run") as caught:
        address(Jobs(*["Initializing"] * 99), wait_seconds=0.0)
    jobs = Jobs(*["Initializing"] * 10_000)
    with pytest.raises(ResourceError, match="does not run") as caught:
        address(jobs, wait_seconds=0.05)
    assert "no GPU is free" in caught.value.got
    assert "kubectl describe pod" in caught.value.fix


def test_stages_of_a_run_share_a_cluster_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    one = train_sft.on_shape(NODE).of_run().cluster
    assert one.name == cluster_of(NODE).name
    names = {one.name, cluster_of(laptop()).name}
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f2")
    names.add(cluster_of(NODE).name)
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "a-name-as-long-as-flyte-allows" * 2)
    names.add(cluster_of(NODE).name)
    assert len(names) == 4
    assert all(len(name) <= 47 for name in names), "KubeRay refuses longer ones"


def test_its_pods_inherit_the_drivers_settings() -> None:
    manifest = cluster_of(NODE).manifest(OWN_POD)
    metadata, spec = manifest["metadata"], manifest["spec"]
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": "flyte.lyft.com/v1alpha1",
            "kind": "flyteworkflow",
            "name": "f1",
            "uid": "7-8-9",
        }
    ], "removed with the Flyte execution, and blocking no removal"
    assert metadata["labels"] == {
        "nemo-rl-flow/execution": "f1",
        "kueue.x-k8s.io/queue-name": "gpus",
    }
    assert spec["shutdownAfterJobFinishes"] is True
    assert (spec["ttlSecondsAfterFinished"], spec["submissionMode"]) == (0, "HTTPMode")
    cluster = spec["rayClusterSpec"]
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    (group,) = cluster["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 1)
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        main = template["spec"]["containers"][0]
        assert main["image"] == "registry/nemo-rl-training:1"
        assert main["env"] == [
            {"name": NO_DRAIN, "value": "0"},
            {"name": "FLYTE_AWS_ENDPOINT", "value": "https://s3"},
        ], "each name once, as Kubernetes asks for"
        secrets = [each["secretRef"]["name"] for each in main["envFrom"]]
        assert secrets == ["nemo-rl-secrets", "of-the-site"]
        assert template["spec"]["imagePullSecrets"] == [{"name": "nemo-rl-registry"}]
        assert template["spec"]["serviceAccountName"] == "default"
        assert template["metadata"]["labels"] == {"app.kubernetes.io/part-of": "nemo-rl-flow"}
    requests = group["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert requests["nvidia.com/gpu"] == "8"
    assert json.loads(json.dumps(manifest)) == manifest
    command = shlex.split(spec["entrypoint"])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "keeper", "exec")
    assert command[3:] == ["nemo-rl-flow", "turn", str(IDLE_SECONDS)]


def test_only_clusters_of_the_run_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs("Running", "Running", "Running")
    address(jobs)
    cluster_of(laptop()).address(jobs, pause_seconds=0)  # type: ignore[arg-type]
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f2")
    address(jobs)
    assert len(give_back(jobs)) == 1  # type: ignore[arg-type]
    assert len(jobs.jobs) == 2
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    assert len(give_back(jobs)) == 2  # type: ignore[arg-type]
    assert give_back(jobs) == []  # type: ignore[arg-type]


def compiled(stage: Any) -> Any:
    image_list = [Image(each.id, *image_name(each).split(":")) for each in images.IMAGES]
    settings = SerializationSettings(
        image_config=ImageConfig(default_image=image_list[0], images=image_list),
        project="flow",
        domain="development",
        version="v1",
    )
    return get_serializable(OrderedDict(), settings, stage).to_flyte_idl().template


@pytest.mark.parametrize("shape", [laptop(), NODE], ids=lambda shape: shape.name)
@pytest.mark.parametrize("stage", [train_sft, evaluate], ids=lambda stage: stage.name)
def test_both_lifetimes_have_one_key(stage: Any, shape: Shape) -> None:
    separate, shared = stage.on_shape(shape), stage.on_shape(shape).of_run()
    one, other = compiled(separate), compiled(shared)
    assert (one.type, other.type) == ("ray", "python-task")
    assert one.id == other.id
    assert one.interface == other.interface
    assert one.metadata == other.metadata
    assert not other.custom.fields
    (main,) = other.k8s_pod.pod_spec["containers"]
    kind = "training" if shape.num_gpus else "laptop"
    assert main["image"].startswith(f"nemo-rl-{kind}:"), "one image for the workers of all stages"
    assert {each["name"] for each in other.k8s_pod.pod_spec["volumes"]} == {
        "store",
        "shared-memory",
    }
    command = shared.get_default_command(SerializationSettings(image_config=ImageConfig()))
    assert shared.task_resolver.load_task(command[-8:]) is shared


def test_inputs_of_a_stage_do_not_contain_the_clusters_lifetime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tasks.plan_tasks.grpo import plan_grpo
    from tasks.recipes.grpo import GRPORecipe

    def plan(lifetime: str) -> Any:
        words = {"recipe": "grpo_arithmetic", "cluster": {"lifetime": lifetime}}
        return plan_grpo.task_function(config=GRPORecipe.model_validate(words))

    received = []
    monkeypatch.setattr(
        "flytekit.core.base_task.flyte_entity_call_handler",
        lambda _entity, **kwargs: received.append(kwargs["config"]),
    )
    for lifetime in ("stage", "run"):
        assert plan(lifetime).sft.cluster.lifetime == lifetime, "the dynamic stage must know it"
        train_sft(config=plan(lifetime).sft, base=None, train=None)
    assert received[0] == received[1]
    assert "lifetime" not in received[1].model_dump_json()


@pytest.mark.parametrize(
    ("lifetime", "changes", "nodes"),
    [
        ("stage", {}, ["evaluate", "promote"]),
        ("run", {}, ["evaluate", "promote", "release_cluster"]),
        ("run", {"promotion": None}, ["evaluate", "release_cluster"]),
        ("run", {"evaluation": None}, ["release_cluster"]),
        ("stage", {"evaluation": None}, []),
    ],
)
def test_the_verdict_on_a_run_releases_its_cluster(
    lifetime: str, changes: dict[str, Any], nodes: list[str]
) -> None:
    from tasks.artifacts import CheckpointArtifact, DatasetArtifact, EvalReport
    from tasks.plan_tasks.grpo import plan_grpo
    from tasks.recipes.grpo import GRPORecipe
    from workflows.common import judge

    words = {"recipe": "grpo_arithmetic", "cluster": {"lifetime": lifetime}, **changes}
    config = plan_grpo.task_function(config=GRPORecipe.model_validate(words)).verdict
    folder = {"directory": {"path": "s3://bucket/folder"}, "stage": "x", "content_hash": "0" * 64}
    before = EvalReport.model_validate({**folder, "metrics": {}, "measured": "x"})
    judge._wf = None  # a container compiles its dynamic stage once, and flytekit keeps that
    ctx = FlyteContextManager.current_context()
    in_container = ctx.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    serialization = SerializationSettings(
        image_config=ImageConfig(), project="p", domain="d", version="v"
    )
    context = ctx.with_execution_state(in_container).with_serialization_settings(serialization)
    with FlyteContextManager.with_context(context) as inner:
        evaluates = changes.get("evaluation", True)
        spec = judge.compile_into_workflow(
            inner,
            judge.task_function,
            config=config,
            start=CheckpointArtifact.model_validate(folder),
            trained=CheckpointArtifact.model_validate(folder),
            before=before if evaluates else None,
            questions=DatasetArtifact.model_validate(folder) if evaluates else None,
            rows=DatasetArtifact.model_validate(folder),
        )
    if not nodes:
        return  # both outputs are None
    names = [node.task_node.reference_id.name for node in spec.nodes]
    assert [name.split(".")[1] for name in names] == nodes
    if "release_cluster" in nodes[1:]:
        assert spec.nodes[-1].upstream_node_ids == [spec.nodes[0].id]
    if "evaluate" not in nodes:
        return
    (first, *_) = spec.tasks
    assert first.type == ("ray" if lifetime == "stage" else "python-task")
    if lifetime == "run":
        command = first.k8s_pod.pod_spec["containers"][0]["args"]
        assert command[-8:] == [*TASK, "shape", laptop().name, "lifetime", "run"]


def test_a_failed_run_releases_its_cluster(
    monkeypatch: pytest.MonkeyPatch, own_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from flytekit.types.error.error import FlyteError

    from tasks.plan_tasks import failures
    from tasks.plan_tasks.grpo import record_failure
    from tasks.recipes.grpo import GRPORecipe

    jobs = Jobs(*["Running"] * 9)
    monkeypatch.setattr(failures, "RayJobApi", lambda: jobs)

    def fail(lifetime: str) -> None:
        words = {"recipe": "grpo_arithmetic", "cluster": {"lifetime": lifetime}}
        config = GRPORecipe.model_validate(words)
        error = FlyteError(message="out of paper", failed_node_id="n3")
        record_failure.task_function(config=config, err=error)

    address(jobs)
    fail("stage")
    assert jobs.asked == ["create"]
    fail("run")
    assert jobs.asked == ["create", "delete"]

    def refuse(_selector: str) -> list[str]:
        raise ResourceError("no right")

    monkeypatch.setattr(jobs, "ray_jobs", refuse)
    fail("run")
    assert "was not released" in caplog.text
    assert len(list(own_store.glob("failures/*-grpo.json"))) == 3


def test_the_keeper_ends_when_no_stage_has_used_the_cluster(python: Callable[..., str]) -> None:
    script = """
import sys, types
ray, util = types.ModuleType("ray"), types.ModuleType("ray.util")
used = [[], [{"namespace": "n", "name": "turn"}], [{"namespace": "n", "name": "another"}]]
call_times = []
def list_named_actors(all_namespaces):
    call_times.append(clock[0])
    return used[1] if 10 <= clock[0] < 25 else used[2]
util.list_named_actors = list_named_actors
sys.modules["ray"], sys.modules["ray.util"] = ray, util
import time
clock = [0.0]
time.monotonic = lambda: clock[0]
def sleep(seconds): clock[0] += seconds
time.sleep = sleep
from tasks.ray_cluster.experimental.cluster_keeper import keep
keep("n", "turn", 20.0)
print(clock[0], max(b - a for a, b in zip(call_times, call_times[1:])))
"""
    ended, pause = map(float, python(script).split())
    assert ended == pytest.approx(24 + 20, abs=2), "20 s after it was last used"
    assert pause <= 5


def test_a_sweep_has_a_cluster_for_each_point() -> None:
    from tasks.recipes.common import RecipeError
    from tasks.recipes.sweep import SweepRecipe

    recipe = SweepRecipe.model_validate({"recipe": "sweep_arithmetic"})
    assert recipe.experiments
    words = recipe.model_dump(mode="json")
    words["base"]["cluster"]["lifetime"] = "run"
    with pytest.raises(RecipeError, match="in parallel"):
        _ = SweepRecipe.model_validate(words).experiments
