"""The RayJobs that Flyte makes of stages are what KubeRay's pinned version takes."""

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.tools.translator import get_serializable

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.errors import ConfigError
from tasks.cluster_check import answer_from_training
from tasks.evaluate import evaluate
from tasks.grpo_iteration import grpo_iteration
from tasks.platform import site_pods
from tasks.platform.pods import GPU
from tasks.platform.shapes import one_gpu, shape_of
from tasks.train_sft import train_sft
from tests.commands import REPOSITORY
from tests.schemas import problems, schema
from tests.schemas.ray_job import ray_job
from tests.unit.tasks.test_deployment import documents
from tests.unit.tasks.test_site_pods import example_with

KUBERAY = schema("kuberay")["RayJob"]
SETTINGS = SerializationSettings(
    image_config=ImageConfig(default_image=Image("default", "unused", "1")),
    project="flow",
    domain="development",
    version="v1",
)
SHAPES = {
    "laptop": ClusterConfig(),
    "one_gpu": ClusterConfig(shape="one_gpu", accelerator="nvidia-h100"),
    "cluster": ClusterConfig(shape="cluster", num_workers=12),
}
RACK = "kueue.x-k8s.io/podset-required-topology"
QUEUE = {"kueue.x-k8s.io/queue-name": "training", "kueue.x-k8s.io/priority-class": "nightly"}
STAGES = [train_sft, grpo_iteration, evaluate]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a file of that text the site's."""

    def write(text: str) -> None:
        (tmp_path / "pods.yaml").write_text(text)
        monkeypatch.setattr(site_pods, "FILE", tmp_path / "pods.yaml")
        site_pods._patches.cache_clear()

    return write


def compiled(stage: Any, shape: str = "laptop") -> Any:
    """The template of a stage on a shape."""
    on_shape = stage.on_shape(shape_of(SHAPES[shape]))
    return get_serializable(OrderedDict(), SETTINGS, on_shape).to_flyte_idl().template


def short_name(stage: Any) -> str:
    return str(stage.name).rpartition(".")[2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", STAGES, ids=short_name)
def test_kuberay_takes_the_job_of_every_stage(stage: Any, shape: str) -> None:
    job = ray_job(compiled(stage, shape))
    assert list(problems(job, KUBERAY)) == []
    assert len(job["metadata"]["name"]) <= 47
    cluster = job["spec"]["rayClusterSpec"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for group in (head, *workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["args"] == []  # KubeRay starts Ray; the submitter sends the command
    assert "pyflyte-execute" in job["spec"]["entrypoint"]


def test_what_kuberay_does_not_take_of_a_job_is_found() -> None:
    job = ray_job(compiled(train_sft))
    job["spec"]["ttlSecondsAfterFinish"] = job["spec"].pop("ttlSecondsAfterFinished")
    job["spec"]["suspend"] = "true"
    groups = job["spec"]["rayClusterSpec"]
    groups["headGroupSpec"]["template"]["spec"]["volumes"][0]["emptyDir"]["sizeLimt"] = "1Gi"
    del groups["workerGroupSpecs"][0]["template"]
    assert list(problems(job, KUBERAY)) == [
        "spec.rayClusterSpec.headGroupSpec.template.spec.volumes[0].emptyDir.sizeLimt: no such key",
        "spec.rayClusterSpec.workerGroupSpecs[0].template: is missing",
        "spec.ttlSecondsAfterFinish: no such key",
        "spec.suspend: 'true' is no boolean",
    ]


def test_a_job_has_no_label_or_spot_unless_the_site_says_so() -> None:
    template = compiled(train_sft)
    assert ray_job(template)["metadata"]["labels"] == {}
    assert not template.metadata.interruptible


@pytest.mark.parametrize("shape", SHAPES)
def test_kueue_has_its_labels_on_the_job_and_on_no_pod(
    says: Callable[[str], None], shape: str
) -> None:
    says(example_with("priority-class"))
    for stage in STAGES:
        job = ray_job(compiled(stage, shape))
        assert list(problems(job, KUBERAY)) == []
        assert job["metadata"]["labels"] == QUEUE
        # What Kueue's webhook asks of a RayJob that it suspends and starts.
        cluster = job["spec"]["rayClusterSpec"]
        assert job["spec"]["shutdownAfterJobFinishes"]
        assert not cluster["enableInTreeAutoscaling"]
        for group in cluster["workerGroupSpecs"]:
            metadata = group["template"]["metadata"]
            assert not metadata["labels"].keys() & QUEUE.keys()
            assert metadata["annotations"] == {}  # kueue.yaml has no topology


def queue_of(name: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The resources of a file's queue of Kueue, and its flavors, each with its quotas by name."""
    (queue,) = [each for each in documents(name) if each["kind"] == "ClusterQueue"]
    (group,) = queue["spec"]["resourceGroups"]
    flavors = {
        each["metadata"]["name"]: each.get("spec", {})
        for file in ("production/kueue.yaml", name)  # applied in this order
        for each in documents(file)
        if each["kind"] == "ResourceFlavor"
    }
    found = []
    for each in group["flavors"]:
        quotas = {quota["name"]: quota["nominalQuota"] for quota in each["resources"]}
        assert [*quotas] == group["coveredResources"]
        found.append({**flavors[each["name"]], "quotas": quotas})
    return group["coveredResources"], found


def asked_by_pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The specs of all pods of a RayJob, head and submitter among them."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    templates = [job["spec"]["submitterPodTemplate"], *(each["template"] for each in groups)]
    return [each["spec"] for each in templates]


def not_counted() -> tuple[str, ...]:
    (values,) = documents("production/values-kueue.yaml")
    config = yaml.safe_load(values["managerConfig"]["controllerManagerConfigYaml"])
    return tuple(config["resources"]["excludeResourcePrefixes"])


def test_kueue_has_the_queue_that_the_example_names() -> None:
    objects = {
        (each["kind"], each["metadata"]["name"]): each
        for each in documents("production/kueue.yaml")
    }
    assert ("WorkloadPriorityClass", QUEUE["kueue.x-k8s.io/priority-class"]) in objects
    local = objects["LocalQueue", QUEUE["kueue.x-k8s.io/queue-name"]]
    for name in ("production/kueue.yaml", "production/kueue_topology.yaml"):
        (queue,) = [each for each in documents(name) if each["kind"] == "ClusterQueue"]
        assert queue["metadata"]["name"] == local["spec"]["clusterQueue"]


def examples() -> list[str]:
    """Everything that the file's comment and the page show of `deployment/pods.yaml`."""
    shipped = site_pods.FILE.read_text()
    found = [each.replace("#   ", "") for each in re.findall(r"(?:^#   .*\n)+", shipped, re.M)]
    page = (REPOSITORY / "docs/clusters.md").read_text()
    found += re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for text in found if re.match(rf"(?:{'|'.join(site_pods.GROUPS)}):\s", text)]


def test_the_examples_are_those_of_both_texts() -> None:
    together = "\n".join(examples())
    for word in ("rdma/ib", "vpc.amazonaws.com/efa", RACK, "weights:", "matchLabelKeys"):
        assert word in together


@pytest.mark.parametrize("example", ["{}", *examples()])
def test_the_queue_covers_what_pods_ask_for(says: Callable[[str], None], example: str) -> None:
    """Kueue never admits a pod that asks for a resource that is neither covered nor excluded."""
    says(example)
    covered, _ = queue_of("production/kueue.yaml")
    for stage in STAGES:
        for spec in asked_by_pods(ray_job(compiled(stage, "cluster"))):
            (container,) = spec["containers"]
            for asked in container["resources"]["requests"]:
                assert asked in covered or asked.startswith(not_counted()), asked


@pytest.mark.parametrize("example", examples())
def test_a_topology_is_asked_for_only_with_its_objects(
    says: Callable[[str], None], example: str
) -> None:
    """Kueue never admits pods with a level of a topology that no flavor with a quota has."""
    says(example)
    groups = ray_job(compiled(train_sft, "cluster"))["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    found = [group["template"]["metadata"]["annotations"].get(RACK) for group in groups]
    asked = {each for each in found if each is not None}
    # kueue.yaml alone, of which the example with a priority is, has no topology.
    assert bool(asked) == (RACK in example and "priority-class" not in example)
    (topology,) = [
        each for each in documents("production/kueue_topology.yaml") if each["kind"] == "Topology"
    ]
    levels = [each["nodeLabel"] for each in topology["spec"]["levels"]]
    assert asked <= {*levels}
    assert levels[-1] == "kubernetes.io/hostname"


def test_workers_with_gpus_have_the_flavor_of_the_racks_and_others_the_other() -> None:
    """By Kueue: the first flavor whose taints a pod tolerates, and of which there is a quota."""
    covered, (racks, other) = queue_of("production/kueue_topology.yaml")
    before, (alone,) = queue_of("production/kueue.yaml")
    assert covered == before
    (topology,) = [
        each["metadata"]["name"]
        for each in documents("production/kueue_topology.yaml")
        if each["kind"] == "Topology"
    ]
    assert racks["topologyName"] == topology
    assert racks["nodeLabels"]  # a rule of its definition, which Kubernetes 1.20 passes over
    assert racks["quotas"] == alone["quotas"]
    assert other["quotas"] == {**alone["quotas"], GPU: 0}
    (taint,) = racks["nodeTaints"]
    for spec in asked_by_pods(ray_job(compiled(train_sft, "cluster"))):
        tolerated = [each["key"] for each in spec.get("tolerations", [])]
        has_gpus = GPU in spec["containers"][0]["resources"]["requests"]
        assert (taint["key"] in tolerated) == has_gpus


def test_a_label_of_the_execution_comes_before_that_of_the_site(
    says: Callable[[str], None],
) -> None:
    """`pyflyte run --remote --labels`: one run with another priority."""
    says(example_with("priority-class"))
    urgent = {"kueue.x-k8s.io/priority-class": "urgent"}
    job = ray_job(compiled(train_sft), execution_labels=urgent)
    assert job["metadata"]["labels"] == QUEUE | urgent


def test_machines_of_one_rack_are_those_of_one_cluster(says: Callable[[str], None]) -> None:
    says(example_with("matchLabelKeys"))
    job = ray_job(compiled(train_sft, "cluster"))
    assert list(problems(job, KUBERAY)) == []
    (group, other) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    for each in (group, other):
        affinity = each["template"]["spec"]["affinity"]["podAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
        # A gang's own workers, by KubeRay's labels: neither those of a stage in another rack, nor
        # its head, which was placed before; a machine outside of all racks would bar the workers.
        assert term["matchLabelKeys"] == ["ray.io/cluster"]
        assert term["labelSelector"] == {"matchLabels": {"ray.io/node-type": "worker"}}
    assert "affinity" not in job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]


def test_spot_is_for_what_goes_on_from_a_save(says: Callable[[str], None]) -> None:
    says("job: {spot_training: true}")
    found = {
        short_name(stage): (compiled(stage).metadata, compiled(stage, "one_gpu").metadata)
        for stage in (train_sft, evaluate, answer_from_training)
    }
    assert [each.interruptible for each in found["train_sft"]] == [True, True]
    assert [each.interruptible for each in found["evaluate"]] == [True, True]  # always was
    assert [each.interruptible for each in found["answer_from_training"]] == [False, False]
    # All but the last of its attempts: Flyte's interruptible-failure-threshold is -1.
    assert found["train_sft"][0].retries.retries == 5


def test_a_local_run_does_not_look_at_it(says: Callable[[str], None]) -> None:
    says("job: {")
    with pytest.raises(ConfigError, match="it cannot be read"):
        compiled(train_sft)
    context = FlyteContextManager.current_context()
    local = context.new_execution_state().with_params(mode=ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    with FlyteContextManager.with_context(context.with_execution_state(local)):
        assert train_sft.on_shape(one_gpu()).metadata.cache
