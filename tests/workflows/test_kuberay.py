"""Stages on Kubernetes with KubeRay's operator: how they end and when their pods are removed."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.evaluate import evaluate
from tasks.pods.pods import STAGE_PID
from tasks.pods.shapes import shape_of
from tasks.train_sft import train_sft
from tests.schemas.ray_job import ray_job
from tests.workflows.cluster_bed.single_stage import SingleStage
from tests.workflows.kubernetes_bed import NAMESPACE, KubernetesBed, why_no_kubernetes
from tests.workflows.kubernetes_bed.propeller import Propeller
from tests.workflows.test_cluster_bed import (
    SFT,
    inputs_of_sft,
    last_saved_step,
    train_locally,
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
    """A stage's RayJob with a custom driver, created on construction.

    Args:
        cluster: Cluster to create the RayJob in.
        name: Name of the RayJob.
        driver: Python source of the stage's process.
        changed: Changed keys of the RayJob's specification.
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
        return dict(self.cluster.admin.get(f"{RAY_JOBS}/{self.name}").get("status") or {})

    @property
    def how(self) -> str:
        """KubeRay's `jobDeploymentStatus`."""
        return str(self.status.get("jobDeploymentStatus", ""))

    def wait(self, is_so: Callable[[], Any], what: str, seconds: float = 600) -> Any:
        deadline = time.monotonic() + seconds
        while not (result := is_so()):
            assert time.monotonic() < deadline, f"{self.name}: {what} did not happen in time"
            time.sleep(0.1)
        return result

    def note(self, name: str) -> Path:
        """Waits for a file that the driver writes, and returns its path."""
        path = self.cluster.volume / f"{self.name}-{name}"
        self.wait(path.exists, name)
        return path

    def pods(self, kind: str = "") -> list[str]:
        return [each["metadata"]["name"] for each in self.cluster.pods(self.name, kind)]

    def end(self) -> dict[str, Any]:
        """Waits until it has ended and the pods of its cluster are gone.

        Returns:
            Its status.
        """
        self.wait(lambda: self.how in ENDED, "an end")
        self.wait(lambda: not self.pods("head") + self.pods("worker"), "the removal of its pods")
        status = self.status
        logger.info("%s: %s", self.name, {key: status.get(key) for key in STATES})
        return status


STATES = ("jobDeploymentStatus", "jobStatus", "reason", "message")

# Stand-in for a stage's process: writes a file with its id and stops cleanly on SIGTERM.
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


def test_gpus_are_released_within_ten_seconds_after_a_stage_ends(cluster: KubernetesBed) -> None:
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
        # The operator leaves the RayJob, for Flyte to read, and the log of the submitter.
        assert job.how == "Complete"
        assert len(job.pods()) == 1
    for each in seconds:
        logger.info(
            "after the driver's end: deleted %.1f s, worker gone %.1f s, head %.1f s", *each
        )
    assert max(worker for _, worker, _ in seconds) < 10, "with its GPUs"
    assert max(head for _, _, head in seconds) < 15


def test_a_worker_ends_immediately_after_its_head(cluster: KubernetesBed) -> None:
    """By default Ray would call the lost head for 30 s until the kubelet kills the worker."""
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
    pod = cluster.admin.find(path)
    return pod is None or "deletionTimestamp" in pod["metadata"]


def test_a_driver_that_fails_fails_its_job(cluster: KubernetesBed) -> None:
    for code in (1, 143):
        status = Job(cluster, f"exit{code}", f"raise SystemExit({code})").end()
        assert status["jobDeploymentStatus"] == "Failed"
        assert status["jobStatus"] == "FAILED"
        assert status["reason"] == "AppFailed"
        assert f"exit code {code}" in status["message"]


def test_the_stage_of_a_drained_head_stops_cleanly_and_its_job_fails(
    cluster: KubernetesBed,
) -> None:
    job = Job(cluster, "drained", RUNS)
    job.note("begun")
    (head,) = job.pods("head")
    began = time.time()
    cluster.admin.request("DELETE", f"{PODS}/{head}")
    stopped = float(job.note("stopped").read_text())
    status = job.end()
    left = cluster.kubelet.ended[head] - began
    logger.info("the stage had SIGTERM after %.1f s, the head left %.1f s", stopped - began, left)
    assert status["jobDeploymentStatus"] == "Failed"
    # The operator queries the head again after the submitter's end; if the head is gone by then, it
    # waits for 30 s.
    assert status["reason"] in ("AppFailed", "JobDeploymentStatusTransitionGracePeriodExceeded")
    assert starts(job) == 1


def test_a_killed_head_is_not_replaced_and_its_job_fails(cluster: KubernetesBed) -> None:
    job = Job(cluster, "headless", RUNS)
    job.note("begun")
    (head,) = job.pods("head")
    cluster.kubelet.processes(head).kill()
    began = time.time()
    status = job.end()
    logger.info("%.1f s after the head's end", time.time() - began)
    assert status["jobDeploymentStatus"] == "Failed"
    assert status["reason"] == "SubmissionFailed"
    assert starts(job) == 1
    assert heads_made(cluster, job) == 1


def test_a_lost_worker_is_replaced_and_the_stage_continues(cluster: KubernetesBed) -> None:
    job = Job(cluster, "workerless", RUNS)
    job.note("begun")
    (worker,) = job.pods("worker")
    cluster.kubelet.processes(worker).kill()
    job.wait(lambda: job.pods("worker") not in ([], [worker]), "another worker")
    assert job.how == "Running"
    assert starts(job) == 1
    # Flyte does the same when an execution is aborted.
    cluster.admin.request("DELETE", f"{RAY_JOBS}/{job.name}")
    job.note("stopped")
    job.wait(lambda: not job.pods(), "the removal of its pods")


def test_the_cluster_of_a_run_that_lost_its_head_is_left_unchanged(cluster: KubernetesBed) -> None:
    """With `lifetime: run` the next stage must notice it and create another (`run_cluster.py`)."""
    job = Job(cluster, "ofrun", RUNS, submissionMode="HTTPMode")
    job.note("begun")
    (head,) = job.pods("head")
    job.wait(lambda: job.status["rayClusterStatus"]["head"]["podName"] == head, "the head's name")
    cluster.kubelet.processes(head).kill()
    job.wait(lambda: job.pods("head") == [], "the removal of the head's pod")
    time.sleep(20)  # several reconcile intervals of the operator
    assert job.how == "Running"
    assert heads_made(cluster, job) == starts(job) == 1
    assert job.status["rayClusterStatus"]["head"]["podName"] == head
    cluster.admin.request("DELETE", f"{RAY_JOBS}/{job.name}")
    job.wait(lambda: not job.pods(), "the removal of its pods")


def test_a_stage_whose_head_is_drained_resumes_from_its_save(
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
            wait_for(lambda: last_saved_step(propeller, stage.attempts[0]), ended)
            (head,) = cluster.pods("stage-n0-0", "head")
            cluster.admin.request("DELETE", f"{PODS}/{head['metadata']['name']}")
            artifact = running.result()
        first = last_saved_step(propeller, stage.attempts[0])
    assert [each.exit_code for each in stage.attempts] == [1, 0]
    logger.info("the second attempt resumed from step %d of the first", first)
    assert artifact["content_hash"] == train_locally(inputs).content_hash


def heads_made(cluster: KubernetesBed, job: Job) -> int:
    """Returns the number of heads that have started."""
    return len([name for name in cluster.logs(job.name) if "-head-" in name])


def starts(job: Job) -> int:
    """Returns the number of times the driver has started."""
    return len(list(job.cluster.volume.glob(f"{job.name}-begun?*")))
