"""Settings that the pods of a run's cluster inherit, in addition to `deployment/pods.yaml`."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format

from nemo_rl_core.config.cluster import ClusterConfig
from tasks.evaluate import evaluate
from tasks.pods import site_pods
from tasks.pods.pods import NO_DRAIN, POD_NAME, SPOT
from tasks.pods.shapes import shape_of
from tasks.ray_cluster.experimental.run_stage import RunStageTask
from tasks.train_sft import train_sft
from tests.schemas import problems, schema
from tests.schemas.ray_job import with_integers
from tests.unit.tasks.test_deployment import documents
from tests.unit.tasks.test_run_cluster import OWN_POD, cluster_of, compiled

pytestmark = pytest.mark.experimental

NODE = shape_of(ClusterConfig(shape="node_8gpu"))
TOKEN = {"secretKeyRef": {"name": "of-the-site", "key": "token"}}
SITE = {
    "all": {
        "container": {
            "env": [
                {"name": "NCCL_DEBUG", "value": "INFO"},
                {"name": "EMPTY", "value": ""},
                {"name": "SITE_TOKEN", "valueFrom": TOKEN},
                {"name": NO_DRAIN, "value": "9"},
            ],
            "envFrom": [{"configMapRef": {"name": "proxy"}}],
        },
        "spec": {"tolerations": [{"key": "team", "operator": "Exists"}]},
    },
    "head": {
        "container": {
            "env": [
                {"name": "OF_HEAD", "value": "1"},
                {"name": "NEMO_RL_ALIASES", "value": "s3://of-the-head"},
            ],
            "envFrom": [{"secretRef": {"name": "of-the-head"}}],
        },
        "spec": {"nodeSelector": {"pool": "cpus"}},
    },
    "gpu_worker": {
        "container": {"env": [{"name": "FLYTE_AWS_ENDPOINT", "value": "https://near"}]},
        "spec": {"serviceAccountName": "of-gpus"},
    },
}
"""A site that gives variables to every group, some of which Flyte gives to pods, too."""

GIVEN = [
    {"name": "FLYTE_AWS_ENDPOINT", "value": "https://s3"},
    {"name": "NEMO_RL_ALIASES", "value": "s3://bucket/aliases"},
    {"name": "TWICE", "value": "1"},
    {"name": "TWICE", "value": "2"},
]
"""Variables of Flyte, after those of the template (`DecorateEnvVars` of its 1.16.8)."""


@pytest.fixture(autouse=True)
def execution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Any]], None]:
    """Makes that text the site's file."""

    def write(found: Mapping[str, Any]) -> None:
        file = tmp_path / f"pods_{len(list(tmp_path.iterdir()))}.yaml"
        file.write_text(yaml.safe_dump(dict(found)))
        monkeypatch.setattr(site_pods, "FILE", file)

    return write


def driver_of(stage: Any, *, is_interruptible: bool = False) -> dict[str, Any]:
    """The pod that Flyte makes of a stage on its run's cluster.

    Kubernetes' own additions are those of `tests/workflows/test_kubernetes.py`.
    """
    template = compiled(RunStageTask(stage.on_shape(NODE)))
    spec = with_integers(json_format.MessageToDict(template.k8s_pod.pod_spec))
    (main,) = spec["containers"]
    main["env"] = [*main["env"], *GIVEN]
    secret = {"secretRef": {"name": "nemo-rl-secrets", "optional": True}}
    main["envFrom"] = [*main["envFrom"], secret]  # by default-env-from-secrets
    if is_interruptible:
        (values,) = documents("production/values-s3.yaml")
        spot = values["configuration"]["inline"]["plugins"]["k8s"]["interruptible-tolerations"]
        spec["tolerations"] = [*spec.get("tolerations", []), *spot]
    labels = {**template.metadata.metadata.labels, "task-name": "tasks-evaluate"}
    return {"metadata": {**OWN_POD["metadata"], "labels": labels}, "spec": spec}


def pods_of(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The specs of the head, and of a worker with GPUs."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [each["template"]["spec"] for each in groups]


def variables(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Indexes by name, each of which Kubernetes accepts once."""
    env = spec["containers"][0]["env"]
    names = Counter(each["name"] for each in env)
    assert [name for name, times in names.items() if times > 1] == []
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in env}


def test_a_site_variable_appears_once_in_its_group(
    site: Callable[[Mapping[str, Any]], None],
) -> None:
    site(SITE)
    job = cluster_of(NODE).manifest(driver_of(evaluate))
    assert list(problems(job, schema("kuberay")["RayJob"])) == []
    head, worker = map(variables, pods_of(job))
    of_all = {"NCCL_DEBUG": "INFO", "EMPTY": "", "SITE_TOKEN": TOKEN, NO_DRAIN: "9", "TWICE": "2"}
    for found in (head, worker):
        assert {name: found[name] for name in of_all} == of_all
        assert POD_NAME not in found
    assert (head["OF_HEAD"], "OF_HEAD" in worker) == ("1", False)
    # The value of the site overrides Flyte's, which the other groups have.
    assert head["NEMO_RL_ALIASES"] == "s3://of-the-head"
    assert worker["NEMO_RL_ALIASES"] == "s3://bucket/aliases"
    assert head["FLYTE_AWS_ENDPOINT"] == "https://s3"
    assert worker["FLYTE_AWS_ENDPOINT"] == "https://near"


def test_sources_of_variables_appear_once_in_their_group(
    site: Callable[[Mapping[str, Any]], None],
) -> None:
    site(SITE)
    driver = driver_of(evaluate)
    driver["spec"]["containers"][0]["envFrom"].append({"secretRef": {"name": "of-flyte"}})
    job = cluster_of(NODE).manifest(driver)
    sources = [
        [next(iter(each.values()))["name"] for each in spec["containers"][0]["envFrom"]]
        for spec in pods_of(job)
    ]
    assert sources == [
        ["nemo-rl-secrets", "proxy", "of-the-head", "of-flyte"],
        ["nemo-rl-secrets", "proxy", "of-flyte"],
    ]


def test_pods_run_where_flyte_and_their_own_group_let_them(
    site: Callable[[Mapping[str, Any]], None],
) -> None:
    site(SITE)
    driver = driver_of(evaluate)
    of_flyte = {"key": "of-flyte", "operator": "Exists"}
    of_kubernetes = {"key": "node.kubernetes.io/not-ready", "operator": "Exists"}
    driver["spec"]["tolerations"] += [of_flyte, of_kubernetes]
    driver["spec"]["nodeSelector"]["of-flyte"] = "1"
    driver["spec"] |= {"serviceAccountName": "default", "imagePullSecrets": [{"name": "registry"}]}
    head, worker = pods_of(cluster_of(NODE).manifest(driver))
    assert [each["key"] for each in head["tolerations"]] == ["team", "of-flyte"]
    assert [each["key"] for each in worker["tolerations"]] == ["nvidia.com/gpu", "team", "of-flyte"]
    assert head["nodeSelector"] == {"pool": "cpus", "of-flyte": "1"}
    assert worker["nodeSelector"] == {"of-flyte": "1"}
    assert (head["serviceAccountName"], worker["serviceAccountName"]) == ("default", "of-gpus")
    assert head["imagePullSecrets"] == worker["imagePullSecrets"] == [{"name": "registry"}]


@pytest.mark.parametrize("spot_training", [True, False])
def test_pods_tolerate_spot_where_training_may_run_there(
    site: Callable[[Mapping[str, Any]], None], spot_training: bool
) -> None:
    """`evaluate` may run there in any case, and the cluster that it makes is that of training."""
    site({"job": {"spot_training": spot_training}})
    for stage, is_interruptible in ((train_sft, spot_training), (evaluate, True)):
        assert RunStageTask(stage).metadata.interruptible is is_interruptible
        driver = driver_of(stage, is_interruptible=is_interruptible)
        for spec in pods_of(cluster_of(NODE).manifest(driver)):
            keys = [each["key"] for each in spec.get("tolerations", [])]
            assert (SPOT in keys) is spot_training
    # The last attempt is on a node of the other kind, and so is a cluster that it makes.
    for spec in pods_of(cluster_of(NODE).manifest(driver_of(train_sft))):
        assert SPOT not in [each["key"] for each in spec.get("tolerations", [])]


def test_labels_and_annotations_of_jobs_are_those_of_the_runs_job(
    site: Callable[[Mapping[str, Any]], None],
) -> None:
    queue, priority = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
    labels = {queue: "training", priority: "nightly", "team": "a", "cost-centre": "1"}
    site({"job": {"labels": labels, "annotations": {"of": "the site"}}})
    driver = driver_of(train_sft)
    assert driver["metadata"]["labels"].items() >= labels.items()
    driver["metadata"]["labels"] |= {priority: "urgent", "team": "b"}  # of the execution
    job = cluster_of(NODE).manifest(driver)
    assert job["metadata"]["labels"] == {
        **labels,
        priority: "urgent",
        "team": "b",
        "nemo-rl-flow/execution": "f1",
    }
    assert job["metadata"]["annotations"] == {"of": "the site"}
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        assert group["template"]["metadata"] == {
            "labels": {"app.kubernetes.io/part-of": "nemo-rl-flow"}
        }
