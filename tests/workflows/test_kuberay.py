"""Stages on Kubernetes through KubeRay's operator: how they end, and when their pods are gone."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.evaluate import evaluate
from tasks.platform.pods import STAGE_PID
from tasks.platform.shapes import shape_of
from tasks.train_sft import train_sft
from tests.schemas.ray_job import ray_job
from tests.workflows.cluster_bed.single_stage import SingleStage
from tests.workflows.kubernetes_bed import NAMESPACE, KubernetesBed, why_no_kubernetes
from tests.workflows.kubernetes_bed.propeller import Propeller
from tests.workflows.test_cluster_bed import (
    SFT,
    handed_over,
    inputs_of_sft,
    trained_here,
    wait_for,
)
from tests.workflows.test_ray_jobs import compiled

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(why_no_kubernetes() is not None, reason=f"{why_no_kubernetes()}"),
]
RAY_JOBS = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
ENDED = ("Complete", "Failed")
KILLED = 137


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesBed]:
    with KubernetesBed(tmp_path_factory.mktemp("kuberay") / "bed") as started:
        yield started


class Job:
    """A stage's RayJob with a driver of the test's own, from its creation on.

    Args:
        driver: Python, as the stage's process.
        changed: Keys of the RayJob's specification.
    """

    def __init__(self, cluster: KubernetesBed, name: str, driver: str, **changed: Any) -> None:
        self.cluster, self.name = cluster, name
        (cluster.volume / f"{name}.py").write_text(driver)
        job = ray_job(compiled(evaluate))
        job["metadata"]["name"] = name
        job["spec"] |= {"entrypoint": f"python /var/nemo_rl/{name}.py", **changed}
        cluster.admin.create(job, NAMESPACE)

    @property
    def status(self) -> dict[str, Any]:
        found = self.cluster.admin.get(f"{RAY_JOBS}/{self.name}").get("status") or {}
        return dict(found)

    @property
    def how(self) -> str:
        """KubeRay's `jobDeploymentStatus`."""
        return str(self.status.get("jobDeploymentStatus", ""))

    def wait(self, is_so: Callable[[], Any], what: str, seconds: float = 600) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := is_so()):
            assert time.monotonic() < deadline, f"{self.name}: {what} did not come"
            time.sleep(0.1)
        return found

    def note(self, name: str) -> Path:
        """A file that the driver writes, when it is there."""
        path = self.cluster.volume / f"{self.name}-{name}"
        self.wait(path.exists, name)
        return path

    def pods(self, kind: str = "") -> list[str]:
        return [each["metadata"]["name"] for each in self.cluster.pods(self.name, kind)]

    def end(self) -> dict[str, Any]:
        """The status in which it ends, when its cluster's pods are gone.

        Returns:
            What KubeRay says of it.
        """
        self.wait(lambda: self.how in ENDED, "an end")
        self.wait(lambda: not self.pods("head") + self.pods("worker"), "the removal of its pods")
        found = self.status
        logger.info("%s: %s", self.name, {key: found.get(key) for key in STATES})
        return found


STATES = ("jobDeploymentStatus", "jobStatus", "reason", "message")

# What a stage's process is to its pod: a file with its id, and an end in order at SIGTERM.
STAGE = f"""
import os, pathlib, signal, sys, time
name = pathlib.Path(__file__).stem
note = lambda word, text="": pathlib.Path(f"/var/nemo_rl/{{name}}-{{word}}").write_text(str(text))
pathlib.Path({STAGE_PID!r}).write_text(str(os.getpid()))
def stop(*_):
    note("stopped", time.time())
    pathlib.Path({STAGE_PID!r}).unlink()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
"""
RUNS = STAGE + "note('begun' + str(time.time())); note('begun'); time.sleep(900)"


def test_gpus_are_given_back_within_ten_seconds_of_a_stages_end(cluster: KubernetesBed) -> None:
    seconds = []
    for number in range(3):
        end = f"pathlib.Path({STAGE_PID!r}).unlink(); note('ended', time.time())"
        job = Job(cluster, f"handback{number}", STAGE + end)
        ended = job.note("ended")
        (worker,) = job.pods("worker")
        (head,) = job.pods("head")
        path = f"{PODS}/{worker}"
        deleted = job.wait(
            lambda at=path: time.time() if is_leaving(cluster, at) else 0, "the removal"
        )
        assert job.end()["jobDeploymentStatus"] == "Complete"
        at = float(ended.read_text())
        gone = {each: cluster.kubelet.ended[each] - at for each in (worker, head)}
        seconds.append((deleted - at, gone[worker], gone[head]))
        # What the operator leaves: the RayJob, for Flyte to see, and the log of the submitter.
        assert job.how == "Complete"
        assert len(job.pods()) == 1
    for each in seconds:
        logger.info(
            "after the driver's end: deleted %.1f s, worker gone %.1f s, head %.1f s", *each
        )
    assert max(worker for _, worker, _ in seconds) < 10, "with its GPUs"
    assert max(head for _, _, head in seconds) < 15


def test_a_worker_whose_head_has_ended_leaves_at_once(cluster: KubernetesBed) -> None:
    """By default Ray would ask that head for 30 s whether it may, and be killed by the kubelet."""
    job = Job(cluster, "headfirst", RUNS)
    job.note("begun")
    (head,), (worker,) = job.pods("head"), job.pods("worker")
    cluster.kubelet.processes(head).kill()
    began = time.time()
    cluster.admin.request("DELETE", f"{RAY_JOBS}/{job.name}")
    job.wait(lambda: worker in cluster.kubelet.exit_codes, "the worker's end")
    seconds = cluster.kubelet.ended[worker] - began
    logger.info(
        "the worker ended with %d, %.1f s after", cluster.kubelet.exit_codes[worker], seconds
    )
    assert cluster.kubelet.exit_codes[worker] != KILLED


def is_leaving(cluster: KubernetesBed, path: str) -> bool:
    found = cluster.admin.find(path)
    return found is None or "deletionTimestamp" in found["metadata"]


def test_a_driver_that_fails_fails_its_job(cluster: KubernetesBed) -> None:
    for code in (1, 143):
        found = Job(cluster, f"exit{code}", f"raise SystemExit({code})").end()
        assert found["jobDeploymentStatus"] == "Failed"
        assert found["jobStatus"] == "FAILED"
        assert found["reason"] == "AppFailed"
        assert f"exit code {code}" in found["message"]


def test_the_stage_of_a_drained_head_stops_in_order_and_its_job_fails(
    cluster: KubernetesBed,
) -> None:
    job = Job(cluster, "drained", RUNS)
    job.note("begun")
    (head,) = job.pods("head")
    began = time.time()
    cluster.admin.request("DELETE", f"{PODS}/{head}")
    stopped = float(job.note("stopped").read_text())
    found = job.end()
    left = cluster.kubelet.ended[head] - began
    logger.info("the stage had SIGTERM after %.1f s, the head left %.1f s", stopped - began, left)
    assert found["jobDeploymentStatus"] == "Failed"
    # The operator asks the head once more after the submitter's end; where that has gone by then,
    # it waits for 30 s.
    assert found["reason"] in ("AppFailed", "JobDeploymentStatusTransitionGracePeriodExceeded")
    assert starts(job) == 1


def test_a_head_that_is_killed_is_not_replaced_and_its_job_fails(cluster: KubernetesBed) -> None:
    job = Job(cluster, "headless", RUNS)
    job.note("begun")
    (head,) = job.pods("head")
    cluster.kubelet.processes(head).kill()
    began = time.time()
    found = job.end()
    logger.info("%.1f s after the head's end", time.time() - began)
    assert found["jobDeploymentStatus"] == "Failed"
    assert found["reason"] == "SubmissionFailed"
    assert starts(job) == 1
    assert heads_made(cluster, job) == 1


def test_a_worker_that_is_lost_is_replaced_and_the_stage_goes_on(cluster: KubernetesBed) -> None:
    job = Job(cluster, "workerless", RUNS)
    job.note("begun")
    (worker,) = job.pods("worker")
    cluster.kubelet.processes(worker).kill()
    job.wait(lambda: job.pods("worker") not in ([], [worker]), "another worker")
    assert job.how == "Running"
    assert starts(job) == 1
    # What Flyte does with an execution that is aborted.
    cluster.admin.request("DELETE", f"{RAY_JOBS}/{job.name}")
    job.note("stopped")
    job.wait(lambda: not job.pods(), "the removal of its pods")


def test_the_cluster_of_a_run_that_lost_its_head_stays_as_it_is(cluster: KubernetesBed) -> None:
    """`lifetime: run`: the next stage has to see it, and to make another (`run_cluster.py`)."""
    job = Job(cluster, "ofrun", RUNS, submissionMode="HTTPMode")
    job.note("begun")
    (head,) = job.pods("head")
    job.wait(lambda: job.status["rayClusterStatus"]["head"]["podName"] == head, "the head's name")
    cluster.kubelet.processes(head).kill()
    job.wait(lambda: job.pods("head") == [], "the removal of the head's pod")
    time.sleep(20)  # several turns of the operator
    assert job.how == "Running"
    assert heads_made(cluster, job) == starts(job) == 1
    assert job.status["rayClusterStatus"]["head"]["podName"] == head
    cluster.admin.request("DELETE", f"{RAY_JOBS}/{job.name}")
    job.wait(lambda: not job.pods(), "the removal of its pods")


def test_a_stage_whose_head_is_drained_goes_on_from_its_save_in_the_next_attempt(
    cluster: KubernetesBed, own_store: Path, tmp_path: Path
) -> None:
    inputs = inputs_of_sft({**SFT, "num_steps": 200})
    with Propeller(cluster, tmp_path / "flyte") as propeller:
        task = train_sft.on_shape(shape_of(inputs["config"].cluster))
        stage = SingleStage(propeller, task, inputs, tmp_path / "stage")
        with ThreadPoolExecutor(1) as background:
            running = background.submit(stage.run)

            def ended() -> int | None:
                return 0 if running.done() else None

            wait_for(lambda: stage.attempts or running.done(), lambda: None)
            assert not running.done(), running.exception()
            wait_for(lambda: handed_over(propeller, stage.attempts[0]), ended)
            (head,) = cluster.pods("stage-n0-0", "head")
            cluster.admin.request("DELETE", f"{PODS}/{head['metadata']['name']}")
            there = running.result()
        first = handed_over(propeller, stage.attempts[0])
    assert [each.exit_code for each in stage.attempts] == [1, 0]
    logger.info("the first attempt has left step %d to the second", first)
    assert there["content_hash"] == trained_here(inputs).content_hash


def heads_made(cluster: KubernetesBed, job: Job) -> int:
    """How many heads have started."""
    return len([name for name in cluster.logs(job.name) if "-head-" in name])


def starts(job: Job) -> int:
    """How often the driver has begun."""
    return len(list(job.cluster.volume.glob(f"{job.name}-begun?*")))
