"""`deployment/pods.yaml` changes the pods of stages, and is refused if it is not valid."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flytekit import Resources
from kubernetes.client import ApiClient

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.store.node_cache import FOLDER, GIB
from tasks.pods import site_pods
from tasks.pods.pods import NO_DRAIN, head_pod, pod_with_node_cache, worker_pod
from tasks.pods.resources import DATA, WEIGHTS
from tasks.pods.shapes import shape_of

GPUS = shape_of(ClusterConfig(shape="node_8gpu", num_workers=8, accelerator="nvidia-h100"))
ANY_GPUS = shape_of(ClusterConfig(shape="node_8gpu", num_workers=8))
LAPTOP = shape_of(ClusterConfig())


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Merges a file with that text into the templates."""

    def write(text: str) -> None:
        file = tmp_path / f"pods_{len(list(tmp_path.iterdir()))}.yaml"
        file.write_text(text)
        monkeypatch.setattr(site_pods, "FILE", file)

    return write


def spec(template: Any) -> dict[str, Any]:
    client = ApiClient()
    written: dict[str, Any] = client.sanitize_for_serialization(  # type: ignore[no-untyped-call]
        template.pod_spec
    )
    return written


def example_with(word: str) -> str:
    """Returns the example in the file's comment that contains a word."""
    shipped = (Path(__file__).parents[3] / "deployment/pods.yaml").read_text()
    blocks = re.findall(r"(?:^#   .*\n)+", shipped, re.MULTILINE)
    site_requests = [block.replace("#   ", "") for block in blocks]
    (example,) = [each for each in site_requests if re.match(r"\w+:\n", each) and word in each]
    return example


def test_the_file_of_the_repository_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = [spec(head_pod()), spec(worker_pod(GPUS, GPUS.nodes[0]))]
    monkeypatch.setattr(site_pods, "FILE", Path("/nowhere"))
    assert shipped == [spec(head_pod()), spec(worker_pod(GPUS, GPUS.nodes[0]))]


def test_the_example_in_the_file_is_merged_into_the_pods(says: Callable[[str], None]) -> None:
    before = spec(worker_pod(GPUS, GPUS.nodes[0]))
    example = example_with("rdma")
    says(example)
    template = worker_pod(GPUS, GPUS.nodes[0])
    after = spec(template)
    assert template.annotations == {"k8s.v1.cni.cncf.io/networks": "rdma-network"}
    assert template.labels == {"app.kubernetes.io/part-of": "nemo-rl-flow"}
    main = after["containers"][0]
    assert main["resources"]["limits"] == {
        **before["containers"][0]["resources"]["limits"],
        "rdma/ib": "8",
    }
    assert main["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in main["env"]
    assert main["volumeMounts"] == before["containers"][0]["volumeMounts"]
    assert after["priorityClassName"] == "training"
    for key in ("tolerations", "nodeSelector", "volumes"):
        assert after[key] == before[key]
    head, laptop = spec(head_pod()), spec(worker_pod(LAPTOP, LAPTOP.nodes[0]))
    for other in (head, laptop):
        assert other["priorityClassName"] == "training"
        assert "rdma/ib" not in other["containers"][0]["resources"]["limits"]
    assert head["containers"][0]["lifecycle"]


def test_stages_without_ray_have_the_sites_requests(says: Callable[[str], None]) -> None:
    shipped = (Path(__file__).parents[3] / "deployment/pods.yaml").read_text()
    (example,) = re.findall(r"(?:^#   (?:weights|data): .*\n)+", shipped, re.MULTILINE)
    project_requests = {
        name: kind.requests for name, kind in (("weights", WEIGHTS), ("data", DATA))
    }
    says(example.replace("#   ", ""))
    assert {
        name: site_pods.requests_of(name, Resources()) for name in project_requests
    } == project_requests
    says("weights: {ephemeral-storage: 440Gi, cpu: 16}")
    site_requests = site_pods.requests_of("weights", project_requests["weights"])
    assert site_requests == Resources(cpu="16", mem="64Gi", ephemeral_storage="440Gi")
    assert site_pods.requests_of("data", project_requests["data"]) == project_requests["data"]


CACHE = "node_cache: {folder: /mnt/disks/ssd0/nemo_rl, gib: 500}"


def test_pods_that_download_have_the_cache_of_their_node(says: Callable[[str], None]) -> None:
    before = spec(head_pod())
    assert pod_with_node_cache() is None
    shipped = (Path(__file__).parents[3] / "deployment/pods.yaml").read_text()
    assert f"\n#   {CACHE}\n" in shipped
    says(CACHE)
    head, plain = spec(head_pod()), spec(pod_with_node_cache())
    worker = spec(worker_pod(GPUS, GPUS.nodes[0]))
    folder = {"path": "/mnt/disks/ssd0/nemo_rl", "type": "DirectoryOrCreate"}
    for pod in (head, worker, plain):
        assert {"name": "node-cache", "hostPath": folder} in pod["volumes"]
        (main,) = pod["containers"]
        (mount,) = [each for each in main["volumeMounts"] if each["name"] == "node-cache"]
        variables = {each["name"]: each.get("value") for each in main["env"]}
        assert variables[FOLDER] == mount["mountPath"]
        assert variables[GIB] == "500"
    assert plain["securityContext"]["runAsUser"] == 1000
    # Nothing else of the head differs.
    head["volumes"].pop()
    head["containers"][0]["volumeMounts"].pop()
    kept = {FOLDER, GIB}
    env = head["containers"][0]["env"]
    head["containers"][0]["env"] = [each for each in env if each["name"] not in kept]
    assert head == before


@pytest.mark.parametrize(
    "given",
    [
        "folder: /a",
        "gib: 5",
        "folder: a, gib: 5",
        "folder: /a, gib: 0",
        "folder: /a, gib: yes",
        "folder: /a, gib: .inf",
        "folder: /a, gib: .nan",
        "folder: /, gib: 5",
    ],
)
def test_a_cache_needs_a_folder_and_a_size(says: Callable[[str], None], given: str) -> None:
    says(f"node_cache: {{{given}}}")
    with pytest.raises(ConfigError, match="node_cache is not a folder with a size") as refused:
        head_pod()
    assert "gib: 500" in str(refused.value)


REGISTERED = """
from tasks.pods import site_pods
from pathlib import Path
import sys
site_pods.FILE = Path(sys.argv[1])
from tasks.prepare_model import prepare_model
print(prepare_model.resources.requests.ephemeral_storage)
print([each.name for each in prepare_model.pod_template.pod_spec.volumes])
"""


@pytest.mark.slow
def test_a_registered_stage_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "pods.yaml").write_text(f"weights: {{ephemeral-storage: 440Gi}}\n{CACHE}")
    ran = subprocess.run(
        [sys.executable, "-c", REGISTERED, tmp_path / "pods.yaml"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout.splitlines()[-2:] == ["440Gi", "['node-cache']"]


def test_lists_grow_and_values_replace(says: Callable[[str], None]) -> None:
    says(
        yaml.safe_dump(
            {
                "all": {"labels": {"queue": 1}, "spec": {"terminationGracePeriodSeconds": 30}},
                "gpu_worker": {"spec": {"tolerations": [{"key": "spot", "operator": "Exists"}]}},
                "head": {
                    "labels": {"queue": "two"},
                    "spec": {"terminationGracePeriodSeconds": 600},
                },
            }
        )
    )
    tolerated = [each["key"] for each in spec(worker_pod(GPUS, GPUS.nodes[0]))["tolerations"]]
    assert tolerated == ["nvidia.com/gpu", "spot"]
    assert spec(head_pod())["terminationGracePeriodSeconds"] == 600
    assert head_pod().labels["queue"] == "two"
    assert worker_pod(LAPTOP, LAPTOP.nodes[0]).labels["queue"] == "1"


def test_a_kind_of_gpu_is_selected_by_the_labels_of_the_site(says: Callable[[str], None]) -> None:
    def selected() -> Any:
        return spec(worker_pod(GPUS, GPUS.nodes[0])).get("nodeSelector")

    says("{}")
    assert selected() == {"k8s.amazonaws.com/accelerator": "nvidia-h100"}
    example = example_with("accelerators")
    says(example)
    assert selected() == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    says("gpu_worker: {accelerators: {nvidia-h200: {product: H200}}}")
    with pytest.raises(ConfigError, match="has no nvidia-h100") as refused:
        worker_pod(GPUS, GPUS.nodes[0])
    assert "one of nvidia-h200" in str(refused.value)
    assert spec(worker_pod(ANY_GPUS, ANY_GPUS.nodes[0])).get("nodeSelector") is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("workers: {}", ["workers is not known", "gpu_worker"]),
        ("worker: {tolerations: []}", ["worker.tolerations is not known", "spec, container"]),
        ("worker: {spec: []}", ["worker.spec", "a map"]),
        ("- all", ["a map of all, head"]),
        ("all: {spec: {priorityClass: a}}", ["all: Kubernetes knows no priorityClass"]),
        ("all: {container: {resource: {}}}", ["knows no containers[0].resource"]),
        ("all: {container: {env: [{nam: a, name: b}]}}", ["containers[0].env[0].nam"]),
        (
            "all: {container: {env: [{name: a, value: 1}]}}",
            ["not a valid part of a pod", "in quotes"],
        ),
        ("all: {", ["it cannot be read"]),
        ("job: {label: {}}", ["job.label is not known", "labels, annotations, spot_training"]),
        ("job: {labels: training}", ["job.labels", "got: 'training'"]),
        ("gpu_worker: {accelerators: {h100: {a: b}}}", ["accelerators.h100 is not known"]),
        ("gpu_worker: {accelerators: {nvidia-h100: H100}}", ["nvidia-h100 is not a map of labels"]),
        ("gpu_worker: {accelerators: {nvidia-h100: {gpus: 8}}}", ["not a map of labels", "8"]),
        ("worker: {accelerators: {}}", ["worker.accelerators is not known"]),
        ("weights: {mem: 1Gi}", ["weights.mem is not known", "cpu, memory, ephemeral-storage"]),
        ("weights: {memory: much}", ["weights.memory is not a quantity", "64Gi", "'much'"]),
        ("data: {cpu: 0}", ["data.cpu is not a quantity", "got: 0"]),
        ("node_cache: {size: 1}", ["node_cache.size is not known", "folder, gib"]),
        ("job: {spot_training: maybe}", ["job.spot_training is neither true nor false", "maybe"]),
    ],
)
def test_invalid_settings_are_refused(
    text: str, names: list[str], says: Callable[[str], None]
) -> None:
    says(text)
    with pytest.raises(ConfigError) as refused:
        worker_pod(LAPTOP, LAPTOP.nodes[0])
    for name in ("deployment/pods.yaml", *names):
        assert name in str(refused.value)


def test_a_ray_node_leaves_at_once_unless_the_site_sets_a_time(
    says: Callable[[str], None],
) -> None:
    def drain_seconds() -> list[str]:
        templates = (head_pod(), worker_pod(LAPTOP, LAPTOP.nodes[0]))
        environments = [each.pod_spec.containers[0].env for each in templates]
        return [each.value for env in environments for each in env if each.name == NO_DRAIN]

    says("")
    assert drain_seconds() == ["0", "0"]
    says(f"worker: {{container: {{env: [{{name: {NO_DRAIN}, value: '9'}}]}}}}")
    assert drain_seconds() == ["0", "9"]
