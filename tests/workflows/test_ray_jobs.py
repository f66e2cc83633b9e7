"""The RayJobs that Flyte makes of stages are what KubeRay's pinned version takes."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.tools.translator import get_serializable

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.errors import ConfigError
from tasks.cluster_check import answer_from_training
from tasks.evaluate import evaluate
from tasks.grpo_iteration import grpo_iteration
from tasks.platform import site_pods
from tasks.platform.shapes import one_gpu, shape_of
from tasks.train_sft import train_sft
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
    kueue = example_with("queue-name")
    says(kueue)
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
            rack = {"kueue.x-k8s.io/podset-required-topology": "topology.kubernetes.io/rack"}
            assert metadata["annotations"] == ({} if shape == "laptop" else rack)


def test_the_queue_covers_what_the_pods_of_stages_ask_for() -> None:
    """Kueue never admits a pod that asks for a resource that is not covered."""
    objects = {each["metadata"]["name"]: each for each in documents("production/kueue.yaml")}
    assert objects["training"]["kind"] == "LocalQueue"  # as the example names it
    assert objects["nightly"]["kind"] == "WorkloadPriorityClass"
    queue = objects[objects["training"]["spec"]["clusterQueue"]]
    (group,) = queue["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] in objects
    assert [each["name"] for each in flavor["resources"]] == group["coveredResources"]
    for stage in STAGES:
        spec = ray_job(compiled(stage, "cluster"))["spec"]
        cluster = spec["rayClusterSpec"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        templates = [spec["submitterPodTemplate"], *(each["template"] for each in groups)]
        for template in templates:
            (container,) = template["spec"]["containers"]
            assert container["resources"]["requests"].keys() <= {*group["coveredResources"]}


def test_a_label_of_the_execution_comes_before_that_of_the_site(
    says: Callable[[str], None],
) -> None:
    """`pyflyte run --remote --labels`: one run with another priority."""
    says(example_with("queue-name"))
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
