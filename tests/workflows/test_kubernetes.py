"""Manifests and rights on Kubernetes' API server with KubeRay's operator.

Ray does not run here.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.evaluate import evaluate
from tasks.pods import site_pods
from tasks.pods.pods import GPU, POD_NAME, SPOT
from tasks.pods.shapes import laptop
from tasks.train_sft import train_sft
from tests.commands import REPOSITORY
from tests.schemas.ray_job import ray_job
from tests.unit.tasks.test_deployment import DEPLOYMENT, VALUES, YAML, documents
from tests.unit.tasks.test_inherited_settings import NODE, SITE, driver_of, pods_of
from tests.unit.tasks.test_run_cluster import OWN_POD, cluster_of
from tests.workflows.cluster_bed import Pod
from tests.workflows.cluster_bed.pod import VOLUME
from tests.workflows.kubernetes_bed import (
    FLYTE,
    NAMESPACE,
    Api,
    ApiError,
    KubernetesBed,
    why_no_kubernetes,
)
from tests.workflows.kubernetes_bed.api import dropped, objects_of
from tests.workflows.kubernetes_bed.binaries import binary
from tests.workflows.kubernetes_bed.rights import allowed
from tests.workflows.test_ray_jobs import SHAPES, compiled, short_name

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(why_no_kubernetes() is not None, reason=f"{why_no_kubernetes()}"),
]

RAY_JOBS = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs"
OF_OTHERS = ("monitoring.coreos.com/", "kueue.x-k8s.io/")
KUEUE = "kueue/crd"
"""Optional folder next to the programs with Kueue's CRDs (`config/components/crd/bases/`)."""
MANIFESTS = [
    name
    for name in YAML
    if any(
        "kind" in each and not str(each.get("apiVersion")).startswith(OF_OTHERS)
        for each in documents(name)
    )
]
FLYTE_WORKFLOWS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "flyteworkflows.flyte.lyft.com"},
    "spec": {
        "group": "flyte.lyft.com",
        "names": {"kind": "FlyteWorkflow", "plural": "flyteworkflows", "singular": "flyteworkflow"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object"}},
            }
        ],
    },
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesBed]:
    with KubernetesBed(tmp_path_factory.mktemp("kubernetes") / "bed") as started:
        yield started


@pytest.fixture(scope="module")
def flyte(cluster: KubernetesBed) -> Api:
    """The API as Flyte's propeller accesses it."""
    return cluster.plane.as_account(*FLYTE)


@pytest.fixture(scope="module")
def stage(cluster: KubernetesBed) -> Api:
    """The API as a stage's pod accesses it."""
    return cluster.plane.as_account(NAMESPACE, "default")


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_object_is_accepted_with_all_of_its_keys(cluster: KubernetesBed, name: str) -> None:
    for each in documents(name):
        if "kind" in each and not each["apiVersion"].startswith(OF_OTHERS):
            namespace = "default" if name.startswith("sandbox/") else NAMESPACE
            taken = cluster.admin.apply(each, namespace, dryRun="All")
            assert list(dropped(each, taken)) == [], each["metadata"]["name"]


@pytest.mark.skipif(
    why_no_kubernetes() is None and not binary(KUEUE).exists(), reason=f"there is no {KUEUE}"
)
def test_kueue_accepts_its_queue_and_priorities(cluster: KubernetesBed) -> None:
    for path in sorted(binary(KUEUE).glob("*.yaml")):
        for definition in objects_of(path):
            cluster.admin.create(definition)
    topology = documents("production/kueue_topology.yaml")
    for each in [*documents("production/kueue.yaml"), *topology]:
        wait(lambda made=each: knows(cluster.admin, made))
        taken = cluster.admin.create(each, NAMESPACE, dryRun="All")
        assert list(dropped(each, taken)) == [], each["metadata"]["name"]
    queue = next(
        each for each in documents("production/kueue.yaml") if "preemption" in each.get("spec", ())
    )
    queue["spec"]["preemption"]["withinClusterQueue"] = "Lower"
    with pytest.raises(ApiError, match='Unsupported value: "Lower"'):
        cluster.admin.create(queue, NAMESPACE, dryRun="All")


def knows(api: Api, made: Mapping[str, Any]) -> bool:
    """Whether the API serves the object's kind."""
    try:
        return api.find(api.path_of(made, NAMESPACE)) is not None
    except ApiError:
        return False


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("task", [train_sft, evaluate], ids=short_name)
def test_the_job_of_a_stage_is_accepted_with_all_of_its_keys(
    flyte: Api, task: Any, shape: str
) -> None:
    job = ray_job(compiled(task, shape))
    taken = flyte.create(job, NAMESPACE, dryRun="All")
    assert list(dropped(job, taken)) == []


def test_invalid_keys_and_values_are_detected(cluster: KubernetesBed, flyte: Api) -> None:
    job = ray_job(compiled(train_sft))
    template = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    template["spec"]["volumes"][0]["emptyDir"]["sizeLimt"] = "1Gi"
    taken = flyte.create(job, NAMESPACE, dryRun="All")
    at = "spec.rayClusterSpec.headGroupSpec.template.spec.volumes[0].emptyDir.sizeLimt"
    assert list(dropped(job, taken)) == [at]
    job["spec"]["suspend"] = "true"
    with pytest.raises(ApiError, match=r"spec\.suspend.*must be of type boolean"):
        flyte.create(job, NAMESPACE, dryRun="All")
    (claim,) = [each for each in documents("production/cluster.yaml") if "storage" in str(each)]
    claim["metadata"]["name"] = "other"
    claim["spec"]["resources"]["requests"]["storage"] = "10 Ti"
    with pytest.raises(ApiError, match="quantities must match"):
        cluster.admin.create(claim, NAMESPACE, dryRun="All")


@pytest.mark.skipif(
    not all(map(shutil.which, ("kubectl", "envsubst"))), reason="needs kubectl and envsubst"
)
def test_setup_commands_create_a_namespace_and_can_be_repeated(
    cluster: KubernetesBed, tmp_path: Path
) -> None:
    namespace = "nemo-rl-staging"
    pages = sorted((REPOSITORY / "docs").glob("cluster*.md"))
    text = "\n".join(path.read_text() for path in pages)
    page = " ".join(text.replace("\\\n", " ").split())
    environment = {**os.environ, **VALUES, "NAMESPACE": namespace, "HOME": str(tmp_path)}
    environment["KUBECONFIG"] = str(cluster.plane.kubeconfig)

    def run(command: str) -> list[str]:
        assert command in page
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=REPOSITORY,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return [line.rpartition(" ")[2] for line in done.stdout.splitlines()]

    of_namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    cluster.admin.create(of_namespace)
    wait(lambda: cluster.admin.items(f"/api/v1/namespaces/{namespace}/serviceaccounts") != [])
    apply = "deployment/fill.sh deployment/production/cluster.yaml | "
    apply += 'kubectl apply --namespace "$NAMESPACE" --filename -'
    logs = "deployment/fill.sh deployment/production/logs.yaml | "
    logs += "kubectl apply --namespace flyte --filename -"
    assert set(run(apply)) == {"created", "configured"}  # cluster-wide objects exist already
    assert set(run(apply)) == {"unchanged"}
    assert set(run(logs)) == {"created"}
    secrets = "--from-literal=client_secret=… --from-literal=oidc_client_secret=…"
    run(f"kubectl create --namespace flyte secret generic nemo-rl-auth {secrets}")


def test_flyte_has_exactly_the_rights_to_ray_jobs_that_it_uses(flyte: Api) -> None:
    every = {"create", "delete", "get", "list", "patch", "update", "watch"}
    assert allowed(flyte, NAMESPACE) == {
        ("ray.io", "rayjobs"): every,
        ("ray.io", "rayclusters"): every,
        ("ray.io", "rayjobs/status"): {"get"},
    }
    # The requests of its plugin manager, for a job that waits.
    job = waiting_job("of-flyte")
    flyte.create(job, NAMESPACE)
    path = f"{RAY_JOBS}/of-flyte"
    assert "of-flyte" in [each["metadata"]["name"] for each in flyte.items(RAY_JOBS)]
    patch = {"metadata": {"finalizers": ["flyte.org/finalizer-k8s"]}}
    for finalizers in (["flyte.org/finalizer-k8s"], []):
        patch = {"metadata": {"finalizers": finalizers}}
        flyte.request("PATCH", path, patch, content_type="application/merge-patch+json")
    flyte.request("DELETE", path)
    wait(lambda: flyte.find(path) is None)


def test_a_stage_may_create_and_delete_ray_jobs_in_its_namespace_and_list_nodes(stage: Api) -> None:
    nodes = {("", "nodes"): {"list"}}
    assert allowed(stage, NAMESPACE) == {
        ("ray.io", "rayjobs"): {"create", "delete", "get", "list"},
        ("", "pods"): {"get"},
        **nodes,
    }
    assert allowed(stage, "default") == nodes
    with pytest.raises(ApiError, match=r'403: .*cannot create resource "rayjobs"'):
        stage.create(waiting_job("elsewhere"), "default")


def test_the_quota_limits_gpus_and_admits_other_pods(cluster: KubernetesBed) -> None:
    def pod(num_gpus: int) -> dict[str, Any]:
        limits = {"nvidia.com/gpu": num_gpus} if num_gpus else {}
        main = {"name": "main", "image": "none", "resources": {"limits": limits}}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "asks"},
            "spec": {"containers": [main]},
        }

    for num_gpus in (0, 64):
        cluster.admin.create(pod(num_gpus), NAMESPACE, dryRun="All")
    with pytest.raises(ApiError, match=r"403: .*exceeded quota: nemo-rl-gpus.*limited.*=64"):
        cluster.admin.create(pod(65), NAMESPACE, dryRun="All")


@pytest.fixture
def without_images(cluster: KubernetesBed) -> Iterator[None]:
    """Pods are created and scheduled, but do not start."""
    cluster.kubelet.can_pull = False
    yield
    cluster.kubelet.can_pull = True


@pytest.mark.parametrize("name", ["f1-n0-0", f"f1-n0-0-{'x' * 39}"])
@pytest.mark.usefixtures("without_images")
def test_pods_of_a_job_match_the_selectors_of_policies_and_logs(
    cluster: KubernetesBed, name: str
) -> None:
    job = ray_job(compiled(evaluate))
    job["metadata"]["name"] = name
    cluster.admin.create(job, NAMESPACE)
    wait(lambda: len(cluster.pods(name)) == 2)
    pods = cluster.pods(name)
    policy = next(
        each for each in documents("production/cluster.yaml") if "podSelector" in str(each)
    )
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    tags = re.search(r"tag_regex: '(.*)'", str((DEPLOYMENT / "production/logs.yaml").read_text()))
    assert tags is not None
    for pod in pods:
        assert pod["metadata"]["labels"].items() >= selected
        (container,) = pod["spec"]["containers"]
        file = f"{pod['metadata']['name']}_{NAMESPACE}_{container['name']}-{'0' * 64}.log"
        match = re.fullmatch(tags[1].replace("(?<", "(?P<"), file)
        assert match is not None
        assert match["execution"] == "f1"
    services = cluster.admin.items(f"/api/v1/namespaces/{NAMESPACE}/services")
    (service,) = [each for each in services if each["metadata"]["name"].startswith(name[:20])]
    assert service["spec"]["type"] == "ClusterIP"  # no port of a node leads to a dashboard
    remove(cluster, name)


@pytest.mark.usefixtures("without_images")
def test_a_job_with_an_unschedulable_pod_waits_and_keeps_its_other_pods(
    cluster: KubernetesBed,
) -> None:
    job = ray_job(compiled(train_sft, "cluster"))  # 8 and 4 GPUs; the machine has 8
    job["metadata"]["name"] = "f2-n0-0"
    cluster.admin.create(job, NAMESPACE)
    wait(lambda: len(cluster.pods("f2-n0-0")) == 3)
    wait(lambda: len(unscheduled(cluster, "f2-n0-0")) == 1)
    (message,) = unscheduled(cluster, "f2-n0-0")
    assert "Insufficient nvidia.com/gpu" in message
    assert status(cluster, "f2-n0-0")["jobDeploymentStatus"] == "Initializing"
    remove(cluster, "f2-n0-0")


@pytest.mark.usefixtures("without_images")
def test_a_job_beyond_the_quota_keeps_the_pods_it_got_and_reports_why(
    cluster: KubernetesBed,
) -> None:
    job = ray_job(compiled(train_sft, "cluster"))
    job["metadata"]["name"] = "f3-n0-0"
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    groups[0] |= dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), 9)
    cluster.admin.create(job, NAMESPACE)

    def refusal() -> list[str]:
        conditions = status(cluster, "f3-n0-0").get("rayClusterStatus", {}).get("conditions", [])
        return [each["message"] for each in conditions if each["type"] == "ReplicaFailure"]

    wait(lambda: refusal() != [])
    assert "exceeded quota: nemo-rl-gpus" in refusal()[0]
    assert status(cluster, "f3-n0-0")["jobDeploymentStatus"] == "Initializing"
    assert len(cluster.pods("f3-n0-0", "worker")) == 8
    remove(cluster, "f3-n0-0")


def unscheduled(cluster: KubernetesBed, job: str) -> list[str]:
    """Returns the messages of pods of a RayJob that could not be scheduled."""
    return [
        each["message"]
        for pod in cluster.pods(job)
        for each in pod["status"].get("conditions", [])
        if each["type"] == "PodScheduled" and each["status"] == "False"
    ]


def remove(cluster: KubernetesBed, job: str) -> None:
    cluster.admin.request("DELETE", f"{RAY_JOBS}/{job}")
    wait(lambda: not cluster.pods(job))


def test_a_suspended_job_waits_without_pods(cluster: KubernetesBed) -> None:
    """Kueue's webhook creates jobs in this state."""
    cluster.admin.create(waiting_job("suspended"), NAMESPACE)
    time.sleep(7)  # twice the operator's reconcile interval
    assert cluster.pods("suspended") == []
    clusters = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"
    assert [each["metadata"]["name"] for each in cluster.admin.items(clusters)] == []
    assert status(cluster, "suspended").get("jobDeploymentStatus") == "Suspended"
    cluster.admin.request("DELETE", f"{RAY_JOBS}/suspended")


def test_a_job_that_the_operator_refuses_reports_why(cluster: KubernetesBed) -> None:
    """The API server accepts it."""
    job = waiting_job("refused")
    job["spec"]["shutdownAfterJobFinishes"] = False
    cluster.admin.create(job, NAMESPACE)
    wait(lambda: status(cluster, "refused").get("jobDeploymentStatus") is not None)
    refused = status(cluster, "refused")
    assert refused["jobDeploymentStatus"] == refused["reason"] == "ValidationFailed"
    assert "suspend" in refused["message"]
    cluster.admin.request("DELETE", f"{RAY_JOBS}/refused")


def test_the_cluster_of_a_run_is_removed_with_its_execution(
    cluster: KubernetesBed, stage: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `lifetime: run` a stage creates the RayJob, and Kubernetes removes it with its owner."""
    cluster.admin.create(FLYTE_WORKFLOWS)
    path = f"/apis/flyte.lyft.com/v1alpha1/namespaces/{NAMESPACE}/flyteworkflows"
    wait(lambda: cluster.admin.find(path) is not None)
    execution = {"apiVersion": "flyte.lyft.com/v1alpha1", "kind": "FlyteWorkflow"}
    uid = cluster.admin.request("POST", path, {**execution, "metadata": {"name": "f1"}})
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    own_pod = deepcopy(OWN_POD)
    own_pod["metadata"]["ownerReferences"][0]["uid"] = uid["metadata"]["uid"]
    run_cluster = cluster_of(laptop())
    job = run_cluster.manifest(own_pod)
    assert list(dropped(job, stage.create(job, NAMESPACE, dryRun="All"))) == []
    job["spec"]["suspend"] = True  # no Ray here
    stage.create(job, NAMESPACE)
    cluster.admin.request("DELETE", f"{path}/f1")
    wait(lambda: cluster.admin.find(f"{RAY_JOBS}/{run_cluster.name}") is None)


def test_the_cluster_of_a_run_is_accepted_when_the_site_sets_variables_of_pods(
    cluster: KubernetesBed,
    stage: Api,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The stage's pod includes the defaults and admission changes of Kubernetes."""
    file = tmp_path / "pods.yaml"
    file.write_text(
        yaml.safe_dump({**SITE, "job": {"spot_training": True, "annotations": {"a": "1"}}})
    )
    monkeypatch.setattr(site_pods, "FILE", file)
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    driver = driver_of(train_sft, is_interruptible=True)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "driver"}}
    cluster.admin.create({**pod, "spec": {**driver["spec"], "schedulerName": "none"}}, NAMESPACE)
    described = cluster.admin.get(f"/api/v1/namespaces/{NAMESPACE}/pods/driver")
    tolerated = [each["key"] for each in described["spec"]["tolerations"]]
    assert "node.kubernetes.io/not-ready" in tolerated
    cluster.admin.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/driver")
    job = cluster_of(NODE).manifest(described)
    assert list(dropped(job, stage.create(job, NAMESPACE, dryRun="All"))) == []
    for spec in pods_of(job):
        keys = [each["key"] for each in spec["tolerations"] if each["key"] != GPU]
        assert keys == ["team", SPOT]
        main = spec["containers"][0]
        main["env"] = [*main["env"], main["env"][0]]  # each name once
    with pytest.raises(ApiError, match=r"422: .*Duplicate value"):
        stage.create(job, NAMESPACE, dryRun="All")


def test_a_pod_calls_kubernetes_with_its_account(cluster: KubernetesBed, tmp_path: Path) -> None:
    """Every request of `tasks/ray_cluster/experimental/ray_job_api.py`."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asks"}}
    main = {"name": "main", "image": "none"}
    spec = {"containers": [main], "schedulerName": "none"}
    cluster.admin.create({**pod, "spec": spec}, NAMESPACE)
    asks = Pod(
        cluster.network,
        "asks",
        ["python", "-c", ASKS, json.dumps(waiting_job("asked"))],
        {
            "PYTHONPATH": VOLUME,
            POD_NAME: "asks",
            "KUBERNETES_SERVICE_HOST": cluster.plane.host,
            "KUBERNETES_SERVICE_PORT": str(cluster.plane.port),
        },
        log=tmp_path / "log",
        volume=REPOSITORY,
        account=cluster.plane.account(NAMESPACE, "default", tmp_path / "account"),
    )
    try:
        wait(lambda: asks.poll() is not None, 300)
    finally:
        asks.remove()
    assert (tmp_path / "log").read_text().splitlines()[-7:] == [
        "asks True False",
        "asked ['asked']",
        "asked",
        "True",
        "None",
        "['machine-1']",
        "403 the role nemo-rl-run-clusters of deployment/production/cluster.yaml",
    ]


ASKS = """
import json, sys
from nemo_rl_core.errors import ResourceError
from tasks.ray_cluster import kubernetes_api
from tasks.ray_cluster.experimental.ray_job_api import RayJobApi
api, job = RayJobApi(), json.loads(sys.argv[1])
job["metadata"]["labels"] = {"of": "this"}
print(api.own_pod()["metadata"]["name"], api.has_pod("asks"), api.has_pod("never"))
api.create_ray_job(job)
api.create_ray_job(job)
print(api.ray_job("asked")["metadata"]["name"], api.ray_jobs("of=this"))
api.delete_ray_job("asked", uid="of-another")
print(api.ray_job("asked")["metadata"]["name"])
api.delete_ray_job("asked", uid=api.ray_job("asked")["metadata"]["uid"])
left = api.ray_job("asked")  # until the operator removes its finalizer
print(left is None or "deletionTimestamp" in left["metadata"])
api.delete_ray_job("never")
print(api.ray_job("never"))
print([each["metadata"]["name"] for each in api.nodes()])
api._ray_jobs["namespace"] = "default"
try:
    api.create_ray_job(job)
except ResourceError as error:
    print(error.got[:3], error.expected)
"""


def waiting_job(name: str) -> dict[str, Any]:
    """Returns a suspended RayJob of a stage."""
    job = deepcopy(ray_job(compiled(evaluate)))
    job["metadata"]["name"] = name
    job["spec"]["suspend"] = True
    return job


def status(cluster: KubernetesBed, name: str) -> dict[str, Any]:
    content: dict[str, Any] = cluster.admin.get(f"{RAY_JOBS}/{name}").get("status") or {}
    return content


def wait(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.1)
