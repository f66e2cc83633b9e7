"""Requests of a stage to Kubernetes' API, over TLS to a server with the rights of the role."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.errors import ResourceError
from tasks.cluster_check import rights_line
from tasks.ray_cluster import kubernetes_api
from tasks.ray_cluster.experimental.ray_job_api import RUN_CLUSTER_RIGHTS, RayJobApi
from tasks.ray_cluster.kubernetes_api import KubernetesApi
from tests.workflows.cluster_bed.kubernetes_server import KubernetesServer

JOB: dict[str, Any] = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": "one", "labels": {"run": "f1"}},
    "spec": {
        "rayClusterSpec": {"headGroupSpec": {"template": {"spec": {"containers": [{"env": []}]}}}}
    },
}


class Pods:
    """A RayJob that runs until it is removed."""

    head = SimpleNamespace(address="10.0.0.7")

    def poll(self) -> None:
        return None

    def remove(self) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesServer]:
    def make(_spec: Mapping[str, Any], _folder: Path, _environment: Mapping[str, str]) -> Any:
        return Pods()

    with KubernetesServer(tmp_path, "127.0.0.1", make) as started:
        for name, file in {"TOKEN": "token", "CERT": "ca.crt"}.items():
            monkeypatch.setattr(
                f"kubernetes.config.incluster_config.SERVICE_{name}_FILENAME",
                str(started.account / file),
            )
        monkeypatch.setattr(kubernetes_api, "_NAMESPACE", started.account / "namespace")
        pod = {"containers": [{"env": [{"name": "NEMO_RL_POD_NAME", "valueFrom": FIELD}]}]}
        admitted = started.admit("evaluate", pod, {"FLYTE_INTERNAL_EXECUTION_ID": "f1"})
        for name, value in admitted.items():
            monkeypatch.setenv(name, value)
        yield started


FIELD = {"fieldRef": {"fieldPath": "metadata.name"}}


@pytest.mark.experimental
def test_a_ray_job_is_made_found_listed_and_removed(server: KubernetesServer) -> None:
    api = RayJobApi()
    assert api.ray_job("one") is None
    api.create_ray_job(JOB)
    api.create_ray_job(JOB)  # another stage was quicker
    stored_job = api.ray_job("one")
    assert stored_job is not None
    uid = stored_job["metadata"].pop("uid")
    assert stored_job["metadata"] == JOB["metadata"]
    assert (api.ray_jobs("run=f1"), api.ray_jobs("run=f2")) == (["one"], [])
    api.delete_ray_job("one", uid="of-another")
    assert api.ray_job("one") is not None
    api.delete_ray_job("one", uid=uid)
    api.delete_ray_job("one", uid=uid)
    assert api.ray_job("one") is None
    assert len(server.ray_jobs) == 1


@pytest.mark.experimental
def test_a_stage_finds_its_own_pod(server: KubernetesServer) -> None:
    pod = RayJobApi().own_pod()
    assert pod["metadata"]["name"] == "evaluate-0"
    assert pod["metadata"]["ownerReferences"][0]["name"] == "f1"
    (main,) = pod["spec"]["containers"]
    assert {"name": "FLYTE_INTERNAL_EXECUTION_ID", "value": "f1"} in main["env"]


def test_a_missing_right_is_explained(server: KubernetesServer) -> None:
    server.rules.discard(("ray.io", "rayjobs", "create"))
    with pytest.raises(ResourceError, match="this pod create rayjobs") as caught:
        RayJobApi().create_ray_job(JOB)
    assert caught.value.got is not None and caught.value.got.startswith("403: ")
    assert "cluster.yaml" in str(caught.value.expected)
    assert server.refused == ["create rayjobs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (
            422,
            'RayJob "one" is invalid: spec: Duplicate value: map[string]interface {}{"name":"A"}',
        ),
        (403, 'admission webhook "vrayjob.kb.io" denied the request: spec.suspend: Forbidden'),
    ],
)
def test_an_invalid_request_is_not_a_missing_right(
    server: KubernetesServer, monkeypatch: pytest.MonkeyPatch, status: int, message: str
) -> None:
    """Kubernetes 1.20's answers to a repeated variable, and to a webhook that refuses."""
    answer = server.answer

    def refuse(method: str, *request: Any) -> tuple[int, Any]:
        return (status, {"message": message}) if method == "POST" else answer(method, *request)

    monkeypatch.setattr(server, "answer", refuse)
    with pytest.raises(ResourceError, match="invalid: Kubernetes refuses to create") as caught:
        RayJobApi().create_ray_job(JOB)
    assert str(caught.value.got).startswith(f"{status}: ")
    assert json.dumps(message) in str(caught.value.got)
    assert "deployment/pods.yaml" in str(caught.value.fix)
    assert "role" not in f"{caught.value.expected} {caught.value.fix}"


def test_machines_are_listed_by_a_role_of_the_whole_cluster(server: KubernetesServer) -> None:
    server.nodes.append({"metadata": {"name": "a", "labels": {"gpus": "8"}}, "spec": {}})
    (node,) = KubernetesApi().nodes()
    assert (node["metadata"]["name"], node["metadata"]["labels"]) == ("a", {"gpus": "8"})
    server.rules.discard(("", "nodes", "list"))
    with pytest.raises(ResourceError, match="this pod list nodes") as caught:
        KubernetesApi().nodes()
    assert "the role nemo-rl-nodes" in str(caught.value.expected)
    assert "lifetime" not in str(caught.value.fix)


@pytest.mark.parametrize("place", ["production", "sandbox"])
def test_the_role_allows_all_requests(place: str) -> None:
    file = Path(__file__).parents[3] / "deployment" / place / "cluster.yaml"
    (role,) = [each for each in yaml.safe_load_all(file.read_text()) if each["kind"] == "Role"]
    allowed = {
        (group, resource): tuple(sorted(rule["verbs"]))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert allowed == RUN_CLUSTER_RIGHTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "lifetime", "state", "says"),
    [
        ([], "stage", "ok", "may make, find and remove the RayJob"),
        (["create", "list"], "stage", "warn", "cannot create rayjobs, list rayjobs: recipes with"),
        (["create"], "run", "fail", "cannot create rayjobs"),
    ],
)
def test_rights_of_a_cluster_for_a_run_are_requested(
    server: KubernetesServer, without: list[str], lifetime: str, state: str, says: str
) -> None:
    server.rules.difference_update({("ray.io", "rayjobs", verb) for verb in without})
    line = rights_line(ClusterConfig.model_validate({"lifetime": lifetime}))
    assert (line.name, line.state) == ("lifetime: run", state)
    assert says in line.found
    assert ("role nemo-rl-run-clusters" in line.fix) == bool(without)
    assert not server.refused
    assert not server.ray_jobs


def test_rights_that_cannot_be_requested_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    line = rights_line(ClusterConfig())
    assert (line.state, "automountServiceAccountToken" in line.fix) == ("warn", True)


def test_outside_a_pod_there_is_no_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ResourceError, match="this pod cannot reach Kubernetes"):
        KubernetesApi()
