"""What Kubernetes' API server, with KubeRay's operator beside it, makes of manifests and rights.

No Ray runs here.
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
from tasks.platform import site_pods
from tasks.platform.pods import GPU, POD_NAME, SPOT
from tasks.platform.shapes import laptop
from tasks.train_sft import train_sft
from tests.commands import REPOSITORY
from tests.schemas.ray_job import ray_job
from tests.unit.tasks.test_deployment import DEPLOYMENT, VALUES, YAML, documents
from tests.unit.tasks.test_run_cluster import OWN_POD, cluster_of
from tests.unit.tasks.test_taken_over import NODE, SITE, driver_of, pods_of
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
"""Kueue's definitions (`config/components/crd/bases/` of its tag) beside the programs, if there."""
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
    """Flyte's propeller."""
    return cluster.plane.as_account(*FLYTE)


@pytest.fixture(scope="module")
def stage(cluster: KubernetesBed) -> Api:
    """A stage's pod."""
    return cluster.plane.as_account(NAMESPACE, "default")


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_object_is_taken_with_all_of_its_keys(cluster: KubernetesBed, name: str) -> None:
    for each in documents(name):
        if "kind" in each and not each["apiVersion"].startswith(OF_OTHERS):
            namespace = "default" if name.startswith("sandbox/") else NAMESPACE
            taken = cluster.admin.apply(each, namespace, dryRun="All")
            assert list(dropped(each, taken)) == [], each["metadata"]["name"]


@pytest.mark.skipif(
    why_no_kubernetes() is None and not binary(KUEUE).exists(), reason=f"there is no {KUEUE}"
)
def test_kueue_takes_its_queue_and_priorities(cluster: KubernetesBed) -> None:
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
    """Whether its kind is served."""
    try:
        return api.find(api.path_of(made, NAMESPACE)) is not None
    except ApiError:
        return False


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("task", [train_sft, evaluate], ids=short_name)
def test_the_job_of_a_stage_is_taken_from_flyte_with_all_of_its_keys(
    flyte: Api, task: Any, shape: str
) -> None:
    job = ray_job(compiled(task, shape))
    taken = flyte.create(job, NAMESPACE, dryRun="All")
    assert list(dropped(job, taken)) == []


def test_what_kubernetes_does_not_take_is_found(cluster: KubernetesBed, flyte: Api) -> None:
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
def test_the_commands_of_the_set_up_make_a_namespace_and_may_be_repeated(
    cluster: KubernetesBed, tmp_path: Path
) -> None:
    namespace = "nemo-rl-staging"
    page = " ".join((REPOSITORY / "docs/clusters.md").read_text().replace("\\\n", " ").split())
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
    assert set(run(apply)) == {"created", "configured"}  # what belongs to no namespace is there
    assert set(run(apply)) == {"unchanged"}
    assert set(run(logs)) == {"created"}
    secrets = "--from-literal=client_secret=… --from-literal=oidc_client_secret=…"
    run(f"kubectl create --namespace flyte secret generic nemo-rl-auth {secrets}")


def test_flyte_may_do_with_ray_jobs_what_it_does_and_nothing_else(flyte: Api) -> None:
    every = {"create", "delete", "get", "list", "patch", "update", "watch"}
    assert allowed(flyte, NAMESPACE) == {
        ("ray.io", "rayjobs"): every,
        ("ray.io", "rayclusters"): every,
        ("ray.io", "rayjobs/status"): {"get"},
    }
    # As its plugin manager does, over a job that waits.
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


def test_a_stage_may_make_and_remove_ray_jobs_of_its_namespace_and_list_nodes(stage: Api) -> None:
    nodes = {("", "nodes"): {"list"}}
    assert allowed(stage, NAMESPACE) == {
        ("ray.io", "rayjobs"): {"create", "delete", "get", "list"},
        ("", "pods"): {"get"},
        **nodes,
    }
    assert allowed(stage, "default") == nodes
    with pytest.raises(ApiError, match=r'403: .*cannot create resource "rayjobs"'):
        stage.create(waiting_job("elsewhere"), "default")


def test_the_quota_holds_gpus_and_lets_other_pods_in(cluster: KubernetesBed) -> None:
    def pod(num_gpus: int) -> dict[str, Any]:
        asked = {"nvidia.com/gpu": num_gpus} if num_gpus else {}
        main = {"name": "main", "image": "none", "resources": {"limits": asked}}
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
    """Pods are made and scheduled, and none starts."""
    cluster.kubelet.can_pull = False
    yield
    cluster.kubelet.can_pull = True


@pytest.mark.parametrize("name", ["f1-n0-0", f"f1-n0-0-{'x' * 39}"])
@pytest.mark.usefixtures("without_images")
def test_pods_of_a_job_are_named_and_labelled_as_policies_and_logs_have_it(
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
        found = re.fullmatch(tags[1].replace("(?<", "(?P<"), file)
        assert found is not None
        assert found["execution"] == "f1"
    services = cluster.admin.items(f"/api/v1/namespaces/{NAMESPACE}/services")
    (service,) = [each for each in services if each["metadata"]["name"].startswith(name[:20])]
    assert service["spec"]["type"] == "ClusterIP"  # no port of the machines leads to a dashboard
    remove(cluster, name)


@pytest.mark.usefixtures("without_images")
def test_a_job_waits_for_the_pod_that_finds_no_machine_and_holds_the_others(
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
def test_a_job_beyond_the_quota_holds_what_it_could_get_and_says_why(
    cluster: KubernetesBed,
) -> None:
    job = ray_job(compiled(train_sft, "cluster"))
    job["metadata"]["name"] = "f3-n0-0"
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    groups[0] |= dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), 9)
    cluster.admin.create(job, NAMESPACE)

    def refusal() -> list[str]:
        found = status(cluster, "f3-n0-0").get("rayClusterStatus", {}).get("conditions", [])
        return [each["message"] for each in found if each["type"] == "ReplicaFailure"]

    wait(lambda: refusal() != [])
    assert "exceeded quota: nemo-rl-gpus" in refusal()[0]
    assert status(cluster, "f3-n0-0")["jobDeploymentStatus"] == "Initializing"
    assert len(cluster.pods("f3-n0-0", "worker")) == 8
    remove(cluster, "f3-n0-0")


def unscheduled(cluster: KubernetesBed, job: str) -> list[str]:
    """Why pods of a RayJob have no machine."""
    return [
        each["message"]
        for pod in cluster.pods(job)
        for each in pod["status"].get("conditions", [])
        if each["type"] == "PodScheduled" and each["status"] == "False"
    ]


def remove(cluster: KubernetesBed, job: str) -> None:
    cluster.admin.request("DELETE", f"{RAY_JOBS}/{job}")
    wait(lambda: not cluster.pods(job))


def test_a_job_that_is_suspended_waits_without_a_pod(cluster: KubernetesBed) -> None:
    """As Kueue's webhook makes it."""
    cluster.admin.create(waiting_job("suspended"), NAMESPACE)
    time.sleep(7)  # twice as long as the operator's turn
    assert cluster.pods("suspended") == []
    clusters = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"
    assert [each["metadata"]["name"] for each in cluster.admin.items(clusters)] == []
    assert status(cluster, "suspended").get("jobDeploymentStatus") == "Suspended"
    cluster.admin.request("DELETE", f"{RAY_JOBS}/suspended")


def test_a_job_that_the_operator_refuses_says_why(cluster: KubernetesBed) -> None:
    """The API server takes it."""
    job = waiting_job("refused")
    job["spec"]["shutdownAfterJobFinishes"] = False
    cluster.admin.create(job, NAMESPACE)
    wait(lambda: status(cluster, "refused").get("jobDeploymentStatus") is not None)
    found = status(cluster, "refused")
    assert found["jobDeploymentStatus"] == found["reason"] == "ValidationFailed"
    assert "suspend" in found["message"]
    cluster.admin.request("DELETE", f"{RAY_JOBS}/refused")


def test_the_cluster_of_a_run_goes_with_its_execution(
    cluster: KubernetesBed, stage: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lifetime: run`: the stage makes the RayJob, and Kubernetes removes it with its owner."""
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


def test_the_cluster_of_a_run_is_taken_with_a_site_that_gives_pods_variables(
    cluster: KubernetesBed,
    stage: Api,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The stage's pod is as Kubernetes describes it, after its defaults and admission."""
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


def test_a_pod_asks_kubernetes_with_its_account(cluster: KubernetesBed, tmp_path: Path) -> None:
    """Every request of `tasks/platform/kubernetes_api.py`."""
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
from tasks.platform import kubernetes_api
from tasks.platform.kubernetes_api import KubernetesApi
api, job = KubernetesApi(), json.loads(sys.argv[1])
job["metadata"]["labels"] = {"of": "this"}
print(api.own_pod()["metadata"]["name"], api.has_pod("asks"), api.has_pod("never"))
api.create_ray_job(job)
api.create_ray_job(job)
print(api.ray_job("asked")["metadata"]["name"], api.ray_jobs("of=this"))
api.delete_ray_job("asked", uid="of-another")
print(api.ray_job("asked")["metadata"]["name"])
api.delete_ray_job("asked", uid=api.ray_job("asked")["metadata"]["uid"])
left = api.ray_job("asked")  # until the operator gives its finalizer up
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
    """A stage's RayJob, suspended."""
    job = deepcopy(ray_job(compiled(evaluate)))
    job["metadata"]["name"] = name
    job["spec"]["suspend"] = True
    return job


def status(cluster: KubernetesBed, name: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.admin.get(f"{RAY_JOBS}/{name}").get("status") or {}
    return found


def wait(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)
