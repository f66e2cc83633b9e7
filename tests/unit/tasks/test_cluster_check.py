"""Output of the cluster checks for each result."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.store import files
from nemo_rl_core.telemetry import notices
from tasks.cli.machine.flyte_cluster_check import NODES, line_of_error
from tasks.cluster_check import (
    check_volume_first,
    check_volume_second,
    find_nodes,
    lines_of_answers,
    notices_line,
)
from tasks.pods.node_room import CheckLine
from tasks.pods.pods import NODE
from tasks.pods.shapes import one_gpu, shape_of

ANSWER: dict[str, Any] = {"losses": [1.0], "gpus": [], "shared_memory_gib": 48.0}
H100 = "NVIDIA H100 80GB HBM3"


def test_two_pods_see_each_others_notes_and_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE, "node-a")
    folder = tmp_path / "notes"
    folder.mkdir()
    first: list[CheckLine] = []
    thread = threading.Thread(target=lambda: first.extend(check_volume_first(folder, 60)))
    thread.start()
    second = check_volume_second(folder, 60)
    thread.join(60)
    assert [(line.name, line.state) for line in [*first, *second]] == [
        ("volume back", "warn"),
        ("volume", "warn"),
        ("locks", "ok"),
    ]
    assert "written on node-a is read on node-a: the same machine" in second[0].found
    assert not folder.exists()


def test_a_note_of_another_machine_and_locks_that_nobody_sees(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "first", "node-b")
    seen, locked = check_volume_second(tmp_path, 60)
    assert (seen.state, locked.state) == ("ok", "warn")
    assert seen.found == "a file written on node-b is read on a machine without a name"
    assert "was given a lock that the other pod holds" in locked.found
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize("seen_by", [check_volume_first, check_volume_second])
def test_an_unshared_volume_is_found(tmp_path: Path, seen_by: Any) -> None:
    (tmp_path / "notes").mkdir()
    (line,) = seen_by(tmp_path / "notes", 0.1)
    assert line.state == "fail"
    assert "within 0.1 s" in line.found
    assert "ReadWriteMany" in line.fix


def test_a_worker_with_the_same_result_passes() -> None:
    (line,) = lines_of_answers([ANSWER], shape_of(ClusterConfig()), "nemo-rl-laptop", expected=1.0)
    assert (line.name, line.state) == ("ray: laptop", "ok")
    assert "a step of training on 1 worker pod equals the head's" in line.found


def test_a_worker_with_another_result_is_named() -> None:
    for wrong in (1.01, math.nan):
        answers = [ANSWER, {**ANSWER, "losses": [1.0, wrong]}]
        (line,) = lines_of_answers(answers, one_gpu(), "nemo-rl-training", expected=1.0)
        assert line.state == "fail"
        assert "dcgmi" in line.fix


def test_a_small_shared_memory_is_named() -> None:
    answers = [{**ANSWER, "shared_memory_gib": 0.0625}]  # 64 MiB, docker's default
    (line,) = lines_of_answers(answers, shape_of(ClusterConfig()), "nemo-rl-laptop", expected=1.0)
    assert line.state == "warn"
    assert "/dev/shm has 0 GiB, not 6" in line.found


@pytest.mark.parametrize(
    ("gpus", "state", "found"),
    [
        ([[H100]], "ok", f"torch computes on 1 x {H100}"),
        ([[]], "fail", "torch sees none, and the shape has 1"),
        ([[H100], ["L4"]], "fail", f"torch sees 1 x L4, 1 x {H100}, and the shape has 1"),
    ],
)
def test_gpus_are_those_of_the_shape(gpus: list[list[str]], state: str, found: str) -> None:
    answers = [{**ANSWER, "gpus": each} for each in gpus]
    _, line = lines_of_answers(answers, one_gpu(), "nemo-rl-training", expected=1.0)
    assert (line.name, line.state, line.found) == ("GPUs: training", state, found)


@pytest.mark.parametrize(
    ("environment", "state", "found"),
    [
        ({}, "warn", "nobody is notified"),
        ({"NEMO_RL_NOTIFY": "here"}, "fail", "has an invalid address; got: here"),
        ({"NEMO_RL_NOTIFY": "a@example.com"}, "fail", "1 mail addresses, and no NEMO_RL_SMTP"),
        ({"NEMO_RL_NOTIFY": "http://127.0.0.1:9/x"}, "fail", "http://127.0.0.1/…: URLError"),
    ],
)
def test_notices_that_do_not_arrive(environment: dict[str, str], state: str, found: str) -> None:
    (line,) = notices_line(environment, notices.send)
    assert line.state == state
    assert found in line.found
    assert "secret" in line.fix or "pods reach" in line.fix or "correct NEMO_RL_NOTIFY" in line.fix


@pytest.mark.parametrize(
    ("message", "found", "fix"),
    [
        (
            'rayjobs.ray.io is forbidden: User "system:serviceaccount:flyte:flyte-binary" cannot',
            "rayjobs.ray.io is forbidden",
            "rbac.extraRules",
        ),
        (
            'no matches for kind "RayJob" in version "ray.io/v1"',
            'no matches for kind "RayJob"',
            "install KubeRay's operator",
        ),
        (
            "Grace period [3m0s] exceeded|containers with unready status: [f1-n0]|Back-off pulling "
            'image "r/nemo-rl-light:1": ErrImagePull',
            "Grace period",
            "push the images",
        ),
        (
            "the container ended with 1\nTraceback (most recent call last):\n  File x\n"
            "PermissionError: Access Denied",
            "PermissionError: Access Denied",
            "read and write the bucket",
        ),
        ("pods is forbidden: exceeded quota: nemo-rl-gpus", "exceeded quota", "ResourceQuota"),
        ("something else", "something else", "logs of its pod"),
        ("", "no error was given", "logs of its pod"),
    ],
)
def test_an_error_of_flyte_has_its_fix(message: str, found: str, fix: str) -> None:
    line = line_of_error("ray", message)
    assert line.state == "fail"
    assert found in line.found
    assert fix in line.fix


def test_every_node_of_the_workflow_has_its_line() -> None:
    from workflows.cluster_check import check_cluster

    check_cluster.compile()
    assert [node.id for node in check_cluster.nodes] == [*NODES]


def test_machines_that_cannot_be_looked_at_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (line,) = find_nodes(cluster=ClusterConfig(), autoscaled=False)
    assert (line.name, line.state) == ("nodes", "warn")
    assert "automountServiceAccountToken" in line.fix
