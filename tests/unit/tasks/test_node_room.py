"""Whether machines have room for the pods of stages, from Kubernetes' description of them."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.cluster import ClusterConfig
from tasks.pods import site_pods
from tasks.pods.node_room import amounts, gpu_node_line, in_words, node_lines, ray_pods
from tasks.pods.pods import GPU
from tasks.pods.shapes import shape_of

ROOM = {"cpu": "190", "memory": "2000Gi", "ephemeral-storage": "2000Gi"}
LAPTOP, ONE_GPU = ClusterConfig(), ClusterConfig(shape="one_gpu")
EIGHT = ClusterConfig(shape="node_8gpu", num_workers=8)
LARGE = ("16", "120Gi", "400Gi")


def gpu_machine(gpus: int, **labels: str) -> dict[str, Any]:
    """A node of Kubernetes with GPUs and a label of their kind."""
    kinds = {f"k8s.amazonaws.com/{key}": value for key, value in labels.items()}
    allocatable = {**ROOM, **({GPU: str(gpus)} if gpus else {})}
    return {
        "metadata": {"labels": {"kubernetes.io/arch": "amd64", **kinds}},
        "spec": {},
        "status": {"allocatable": allocatable},
    }


@pytest.mark.parametrize(
    ("nodes", "state", "says"),
    [
        ([gpu_machine(8, accelerator="nvidia-h100")] * 2, "ok", "room for 2 pods with 8 x nvidia"),
        ([gpu_machine(16, accelerator="nvidia-h100")], "ok", "on 1 of 1 machines"),
        ([gpu_machine(8, accelerator="nvidia-h100")], "warn", "room for 1 pods"),
        ([gpu_machine(4, accelerator="nvidia-h100")] * 4, "warn", "room for 0 pods"),
        ([gpu_machine(0)], "warn", "room for 0 pods"),
        ([], "warn", "the shape has 2"),
        ([gpu_machine(8), gpu_machine(8)], "fail", "those with GPUs have no label of a kind"),
        (
            [gpu_machine(8, accelerator="H100")] * 2,
            "fail",
            "have k8s.amazonaws.com/accelerator=H100",
        ),
    ],
)
def test_machines_are_found_by_their_gpus_and_labels(
    nodes: list[dict[str, Any]], state: str, says: str
) -> None:
    shape = shape_of(ClusterConfig(shape="cluster", num_workers=16, accelerator="nvidia-h100"))
    line = gpu_node_line(shape, shape.nodes[0], nodes)
    assert (line.name, line.state) == ("nodes", state)
    assert says in line.found
    assert bool(line.fix) == (state != "ok")


@pytest.mark.parametrize(
    ("labels", "may_be_labeled", "may_be_named"),
    [
        ([{"accelerator": "nvidia-a100"}], False, True),
        ([{"accelerator": "nvidia-a100"}, {}], True, True),
        ([{}], True, False),
    ],
)
def test_a_missing_kind_of_gpu_is_not_replaced_by_another(
    labels: list[dict[str, str]], may_be_labeled: bool, may_be_named: bool
) -> None:
    """A group of H100 that is scaled to zero, next to machines of another kind."""
    shape = shape_of(ClusterConfig(shape="node_8gpu", num_workers=8, accelerator="nvidia-h100"))
    nodes = [gpu_machine(8, **each) for each in labels]
    label = "k8s.amazonaws.com/accelerator=nvidia-h100"
    for autoscaled, state in ((False, "fail"), (True, "warn")):
        line = gpu_node_line(shape, shape.nodes[0], nodes, autoscaled=autoscaled)
        assert line.state == state
        assert (f"kubectl label nodes NODE {label}" in line.fix) == may_be_labeled
        assert ("gpu_worker.accelerators" in line.fix) == may_be_named
        assert ("--autoscaled" in line.fix) != autoscaled
        assert (f"machines that is added have the label {label}" in line.fix) == autoscaled


def test_labels_of_the_site_name_the_kind_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pods.yaml").write_text("gpu_worker: {accelerators: {nvidia-h100: {pool: h100}}}")
    monkeypatch.setattr(site_pods, "FILE", tmp_path / "pods.yaml")
    shape = shape_of(ClusterConfig(shape="node_8gpu", num_workers=8, accelerator="nvidia-h100"))
    node = gpu_machine(8)
    node["metadata"]["labels"]["pool"] = "a100"
    line = gpu_node_line(shape, shape.nodes[0], [node])
    assert "those with GPUs have pool=a100" in line.found
    assert "kubectl label" not in line.fix


def test_a_machine_that_accepts_no_pods_does_not_count() -> None:
    shape = shape_of(ClusterConfig(shape="node_8gpu", num_workers=8))
    node = gpu_machine(8)
    assert gpu_node_line(shape, shape.nodes[0], [node]).state == "ok"
    node["spec"]["unschedulable"] = True
    assert gpu_node_line(shape, shape.nodes[0], [node]).state == "warn"


def machine(
    cpu: str, memory: str, disk: str, gpus: int = 0, taint: str | None = None
) -> dict[str, Any]:
    """A node of Kubernetes, by the resources that pods can have."""
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    gpu_resources = {GPU: str(gpus)} if gpus else {}
    return {
        "metadata": {"labels": {}},
        "spec": {"taints": taints},
        "status": {
            "allocatable": {
                "cpu": cpu,
                "memory": memory,
                "ephemeral-storage": disk,
                **gpu_resources,
            }
        },
    }


def test_a_machine_too_small_for_any_stage_has_no_room() -> None:
    """An audit's machine, for which the check wrongly reported room for a pod."""
    lines = node_lines(ONE_GPU, [machine("3920m", "14Gi", "18Gi", gpus=1)])
    assert {(line.name, line.state) for line in lines} == {("nodes", "fail")}
    assert len(lines) == 4  # the submitter, and a stage that compares, would run
    worker, head, weights, data = lines
    assert worker.found == (
        "no machine is large enough for a worker with 1 GPU: it asks for 1 x nvidia.com/gpu, "
        "11 cores, 120 GiB, 100 GiB of disk, and the largest has 3.92 cores, 14 GiB, 18 GiB of disk"
    )
    assert worker.fix.startswith("use machines with more cores and memory and disk than the pod")
    assert "gpu_worker.container.resources in deployment/pods.yaml" in worker.fix
    assert "head of a Ray cluster: it asks for 4 cores, 32 GiB, 50 GiB of disk" in head.found
    assert "head.container.resources in deployment/pods.yaml" in head.fix
    assert "holds full weights: it asks for 8 cores, 64 GiB, 200 GiB of disk" in weights.found
    assert "lower weights in deployment/pods.yaml and register again" in weights.fix
    assert data.fix.startswith("use machines with more memory than the pod requests")


@pytest.mark.parametrize(
    ("missing", "machines"),
    [
        ("disk", [machine("16", "120Gi", "90Gi"), machine("3", "120Gi", "400Gi")]),
        ("cores", [machine("4", "120Gi", "400Gi")]),
        ("memory", [machine("16", "60Gi", "400Gi")]),
    ],
)
def test_missing_resources_are_named_with_the_largest_machine(
    missing: str, machines: list[dict[str, Any]]
) -> None:
    """Each has room for a Ray cluster on a laptop's scale, and none for a full model."""
    (line,) = [each for each in node_lines(LAPTOP, machines) if "weights" in each.found]
    assert line.state == "fail"
    assert line.fix.startswith(f"use machines with more {missing} than the pod requests")


def test_every_pod_has_room_on_machines_that_are_large_enough() -> None:
    (line,) = node_lines(LAPTOP, [machine(*LARGE)])
    assert (line.state, line.fix) == ("ok", "")
    assert "1 x head of a Ray cluster, 1 x submitter of a RayJob, 1 x worker" in line.found
    assert "holds full weights with 8 cores, 64 GiB, 200 GiB of disk" in line.found
    gpus, pods = node_lines(ONE_GPU, [machine(*LARGE), machine("12", "130Gi", "200Gi", gpus=1)])
    assert (gpus.state, pods.state) == ("ok", "ok")


def test_pods_of_one_stage_need_their_room_at_once() -> None:
    """The head has 32 GiB, the submitter 8, and the worker 16: 56 GiB in all."""
    large, small = machine("8", "64Gi", "200Gi"), machine("2", "8Gi", "60Gi")
    assert [line.state for line in node_lines(LAPTOP, [large])] == ["ok"]
    run = ClusterConfig(shape="laptop", lifetime="run")  # a stage of 32 GiB instead of 8
    (line,) = node_lines(run, [large])
    assert line.state == "warn"
    assert "next to the others there is not enough room for a worker with no GPU" in line.found
    assert "until then a RayJob waits" in line.fix
    assert [each.state for each in node_lines(run, [large, small])] == ["warn"]
    assert [each.state for each in node_lines(run, [large, large])] == ["ok"]


@pytest.mark.parametrize("taint", [GPU, "node-role.kubernetes.io/control-plane"])
def test_a_tainted_machine_has_no_room(taint: str) -> None:
    lines = node_lines(LAPTOP, [machine(*LARGE, taint=taint)])
    assert {line.state for line in lines} == {"fail"}
    assert {"largest" in line.found for line in lines} == {False}
    assert [line.state for line in node_lines(LAPTOP, [machine(*LARGE, taint="team")])] == ["ok"]


def test_a_worker_with_a_gpu_is_let_onto_machines_kept_for_gpus() -> None:
    gpus = machine("12", "130Gi", "200Gi", gpus=1, taint=GPU)
    lines = node_lines(ONE_GPU, [gpus, machine(*LARGE)])
    assert [line.state for line in lines] == ["ok", "ok"]


def test_with_an_autoscaler_small_machines_are_a_warning() -> None:
    small = [machine("4", "14Gi", "18Gi", gpus=1)]
    lines = node_lines(ONE_GPU, small, autoscaled=True)
    assert {line.state for line in lines} == {"warn"}
    assert not any("--autoscaled" in line.fix for line in lines)
    assert all("--autoscaled" in line.fix for line in node_lines(ONE_GPU, small))


def test_pods_request_the_sites_lower_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example in the file's comment: eight A100 of Google, and little disk for heads."""
    shipped = site_pods.FILE.read_text().replace("#   ", "")
    example = shipped[shipped.index("gpu_worker:\n  container:\n    resources: {requests: {mem") :]
    (tmp_path / "pods.yaml").write_text(example[: example.index("\n#")])
    monkeypatch.setattr(site_pods, "FILE", tmp_path / "pods.yaml")
    requests = {size.name: in_words(size.requests) for size, _ in ray_pods(EIGHT)}
    assert requests["head of a Ray cluster"] == "4 cores, 32 GiB, 20 GiB of disk"
    google = machine("95", "659Gi", "900Gi", gpus=8)
    shape = shape_of(EIGHT)
    assert gpu_node_line(shape, shape.nodes[0], [google]).state == "ok"
    monkeypatch.setattr(site_pods, "FILE", tmp_path / "none")
    assert gpu_node_line(shape, shape.nodes[0], [google]).state == "fail"


def test_amounts_in_words() -> None:
    amounts_by_name = amounts({"cpu": "1", "memory": "1536Mi", "vpc.amazonaws.com/efa": "32"})
    assert in_words(amounts_by_name) == "32 x vpc.amazonaws.com/efa, 1 core, 1.5 GiB"
    assert in_words(amounts({"ephemeral-storage": "19326735360"})) == "18 GiB of disk"
