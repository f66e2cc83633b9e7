"""KubeRay's pinned version accepts the RayJobs that Flyte makes of stages."""

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
from tasks.pods import site_pods
from tasks.pods.pods import GPU
from tasks.pods.shapes import one_gpu, shape_of
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
def use_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that sets the text of the site's file."""

    def write(text: str) -> None:
        (tmp_path / "pods.yaml").write_text(text)
        monkeypatch.setattr(site_pods, "FILE", tmp_path / "pods.yaml")
        site_pods._patches.cache_clear()

    return write


def compiled(stage: Any, shape: str = "laptop") -> Any:
    """Returns the template of a stage on a shape."""
    on_shape = stage.on_shape(shape_of(SHAPES[shape]))
    return get_serializable(OrderedDict(), SETTINGS, on_shape).to_flyte_idl().template


def short_name(stage: Any) -> str:
    return str(stage.name).rpartition(".")[2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", STAGES, ids=short_name)
def test_kuberay_accepts_the_job_of_every_stage(stage: Any, shape: str) -> None:
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


def test_invalid_parts_of_a_job_are_detected() -> None:
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
        "spec.suspend: 'true' is not of type boolean",
    ]


def test_a_job_has_labels_and_spot_only_if_the_site_sets_them() -> None:
    template = compiled(train_sft)
    assert ray_job(template)["metadata"]["labels"] == {}
    assert not template.metadata.interruptible


@pytest.mark.parametrize("shape", SHAPES)
def test_labels_of_kueue_are_on_the_job_and_not_on_pods(
    use_site: Callable[[str], None], shape: str
) -> None:
    use_site(example_with("priority-class"))
    for stage in STAGES:
        job = ray_job(compiled(stage, shape))
        assert list(problems(job, KUBERAY)) == []
        assert job["metadata"]["labels"] == QUEUE
        # Requirements of Kueue's webhook for a RayJob that it suspends and starts.
        cluster = job["spec"]["rayClusterSpec"]
        assert job["spec"]["shutdownAfterJobFinishes"]
        assert not cluster["enableInTreeAutoscaling"]
        for group in cluster["workerGroupSpecs"]:
            metadata = group["template"]["metadata"]
            assert not metadata["labels"].keys() & QUEUE.keys()
            assert metadata["annotations"] == {}  # kueue.yaml has no topology


def queue_of(name: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the resources of a file's Kueue queue, and its flavors with their quotas by name."""
    (queue,) = [each for each in documents(name) if each["kind"] == "ClusterQueue"]
    (group,) = queue["spec"]["resourceGroups"]
    flavors = {
        each["metadata"]["name"]: each.get("spec", {})
        for file in ("production/kueue.yaml", name)  # applied in this order
        for each in documents(file)
        if each["kind"] == "ResourceFlavor"
    }
    with_quotas = []
    for each in group["flavors"]:
        quotas = {quota["name"]: quota["nominalQuota"] for quota in each["resources"]}
        assert [*quotas] == group["coveredResources"]
        with_quotas.append({**flavors[each["name"]], "quotas": quotas})
    return group["coveredResources"], with_quotas


def pod_specs(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the specs of all pods of a RayJob, including head and submitter."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    templates = [job["spec"]["submitterPodTemplate"], *(each["template"] for each in groups)]
    return [each["spec"] for each in templates]


def not_counted() -> tuple[str, ...]:
    (values,) = documents("production/values-kueue.yaml")
    config = yaml.safe_load(values["managerConfig"]["controllerManagerConfigYaml"])
    return tuple(config["resources"]["excludeResourcePrefixes"])


def test_the_queue_of_the_example_exists() -> None:
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
    """Returns all examples for `deployment/pods.yaml` in its comment and on the page."""
    shipped = site_pods.FILE.read_text()
    texts = [each.replace("#   ", "") for each in re.findall(r"(?:^#   .*\n)+", shipped, re.M)]
    page = (REPOSITORY / "docs/clusters.md").read_text()
    texts += re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for text in texts if re.match(rf"(?:{'|'.join(site_pods.GROUPS)}):\s", text)]


def test_examples_include_those_of_the_file_and_the_page() -> None:
    together = "\n".join(examples())
    for word in ("rdma/ib", "vpc.amazonaws.com/efa", RACK, "weights:", "matchLabelKeys"):
        assert word in together


@pytest.mark.parametrize("example", ["{}", *examples()])
def test_the_queue_covers_the_requests_of_pods(
    use_site: Callable[[str], None], example: str
) -> None:
    """Kueue never admits a pod that requests a resource that is neither covered nor excluded."""
    use_site(example)
    covered, _ = queue_of("production/kueue.yaml")
    for stage in STAGES:
        for spec in pod_specs(ray_job(compiled(stage, "cluster"))):
            (container,) = spec["containers"]
            for name in container["resources"]["requests"]:
                assert name in covered or name.startswith(not_counted()), name


@pytest.mark.parametrize("example", examples())
def test_a_topology_is_requested_only_if_its_objects_exist(
    use_site: Callable[[str], None], example: str
) -> None:
    """Kueue never admits pods that require a topology level without a flavor that has a quota."""
    use_site(example)
    groups = ray_job(compiled(train_sft, "cluster"))["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    annotations = [group["template"]["metadata"]["annotations"].get(RACK) for group in groups]
    required = {each for each in annotations if each is not None}
    # The example with a priority uses only kueue.yaml, which has no topology.
    assert bool(required) == (RACK in example and "priority-class" not in example)
    (topology,) = [
        each for each in documents("production/kueue_topology.yaml") if each["kind"] == "Topology"
    ]
    levels = [each["nodeLabel"] for each in topology["spec"]["levels"]]
    assert required <= {*levels}
    assert levels[-1] == "kubernetes.io/hostname"


def test_only_workers_with_gpus_get_the_flavor_of_the_racks() -> None:
    """Kueue picks the first flavor with a quota whose taints a pod tolerates."""
    covered, (racks, other) = queue_of("production/kueue_topology.yaml")
    before, (single,) = queue_of("production/kueue.yaml")
    assert covered == before
    (topology,) = [
        each["metadata"]["name"]
        for each in documents("production/kueue_topology.yaml")
        if each["kind"] == "Topology"
    ]
    assert racks["topologyName"] == topology
    assert racks["nodeLabels"]  # a rule of its CRD that Kubernetes 1.20 does not check
    assert racks["quotas"] == single["quotas"]
    assert other["quotas"] == {**single["quotas"], GPU: 0}
    (taint,) = racks["nodeTaints"]
    for spec in pod_specs(ray_job(compiled(train_sft, "cluster"))):
        tolerated = [each["key"] for each in spec.get("tolerations", [])]
        has_gpus = GPU in spec["containers"][0]["resources"]["requests"]
        assert (taint["key"] in tolerated) == has_gpus


def test_labels_of_the_execution_override_those_of_the_site(
    use_site: Callable[[str], None],
) -> None:
    """`pyflyte run --remote --labels` gives one run another priority."""
    use_site(example_with("priority-class"))
    urgent = {"kueue.x-k8s.io/priority-class": "urgent"}
    job = ray_job(compiled(train_sft), execution_labels=urgent)
    assert job["metadata"]["labels"] == QUEUE | urgent


def test_the_affinity_to_a_rack_applies_to_workers_of_one_cluster(
    use_site: Callable[[str], None],
) -> None:
    use_site(example_with("matchLabelKeys"))
    job = ray_job(compiled(train_sft, "cluster"))
    assert list(problems(job, KUBERAY)) == []
    (group, other) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    for each in (group, other):
        affinity = each["template"]["spec"]["affinity"]["podAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
        # KubeRay's labels select the workers of one cluster, but not its head: if that were on a
        # machine outside all racks, no worker could be scheduled.
        assert term["matchLabelKeys"] == ["ray.io/cluster"]
        assert term["labelSelector"] == {"matchLabels": {"ray.io/node-type": "worker"}}
    assert "affinity" not in job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]


def test_only_stages_that_can_resume_run_on_spot_machines(use_site: Callable[[str], None]) -> None:
    use_site("job: {spot_training: true}")
    metadata = {
        short_name(stage): (compiled(stage).metadata, compiled(stage, "one_gpu").metadata)
        for stage in (train_sft, evaluate, answer_from_training)
    }
    assert [each.interruptible for each in metadata["train_sft"]] == [True, True]
    assert [each.interruptible for each in metadata["evaluate"]] == [
        True,
        True,
    ]  # always
    assert [each.interruptible for each in metadata["answer_from_training"]] == [False, False]
    # This applies to all attempts but the last: Flyte's interruptible-failure-threshold is -1.
    assert metadata["train_sft"][0].retries.retries == 5


def test_a_local_run_ignores_the_site(use_site: Callable[[str], None]) -> None:
    use_site("job: {")
    with pytest.raises(ConfigError, match="it cannot be read"):
        compiled(train_sft)
    context = FlyteContextManager.current_context()
    local = context.new_execution_state().with_params(mode=ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    with FlyteContextManager.with_context(context.with_execution_state(local)):
        assert train_sft.on_shape(one_gpu()).metadata.cache
