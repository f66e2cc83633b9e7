"""The Ray cluster that all stages of a run share (`cluster.lifetime: run`), as a RayJob.

Flyte's Ray plugin makes a RayJob for each task, and cannot name the cluster of another one. So the
first stage with work creates a RayJob in Kubernetes that runs only a waiting program
(`cluster_keeper.py`); KubeRay removes the cluster when that program ends. Stages are plain pods,
which join it (`joining.py`).
"""

import hashlib
import logging
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flytekitplugins.ray import HeadNodeConfig, WorkerNodeConfig

from nemo_rl_core.errors import ResourceError
from nemo_rl_core.telemetry.waiting import waiting
from tasks.pods.ray_manifest import cluster_spec
from tasks.ray_cluster.experimental import inherited
from tasks.ray_cluster.experimental.joining import TURN, TURNS
from tasks.ray_cluster.experimental.ray_job_api import RayJobApi

_LOG = logging.getLogger(f"nemo_rl_core.{__name__}")  # prefix of the run's log

EXECUTION_LABEL = "nemo-rl-flow/execution"

IDLE_SECONDS = 300
"""A cluster that no stage has used for this long is released; a later stage makes another."""

_WAIT_SECONDS = 2 * 3600.0
_PORT = 6379
_LONGEST_NAME = 47  # KubeRay derives longer names from it
_KEEPER = Path(__file__).with_name("cluster_keeper.py")
_KEPT_OF_OWNERS = ("apiVersion", "kind", "name", "uid")


@dataclass(frozen=True)
class RunCluster:
    """The cluster of one shape of the run that this container belongs to.

    Attributes:
        shape: Name of the shape: stages of another shape have another cluster.
    """

    shape: str
    head: HeadNodeConfig
    workers: Sequence[WorkerNodeConfig]

    @cached_property
    def name(self) -> str:
        """Name of the RayJob: the same in every stage of the run that has this shape."""
        shape = hashlib.sha256(self.shape.encode()).hexdigest()[:8]
        name = f"nemo-rl-{_execution()}-{shape}"
        if len(name) <= _LONGEST_NAME:
            return name
        return f"nemo-rl-{hashlib.sha256(_execution().encode()).hexdigest()[:20]}-{shape}"

    def address(
        self, api: RayJobApi, *, wait_seconds: float = _WAIT_SECONDS, pause_seconds: float = 2.0
    ) -> str:
        """Creates the cluster if there is none; returns the head's address once its pods run."""
        deadline = time.monotonic() + wait_seconds
        with waiting("waiting for the run's Ray cluster"):
            while True:
                job = api.ray_job(self.name)
                status = (job or {}).get("status") or {}
                job_status = status.get("jobDeploymentStatus", "")
                if job is None:
                    _LOG.info("the run's Ray cluster was created: RayJob %s", self.name)
                    api.create_ray_job(self.manifest(api.own_pod()))
                elif job["metadata"].get("deletionTimestamp"):
                    job_status = "Deleting"  # the name is free when the pods are gone
                elif job_status in ("Complete", "Failed"):  # released, or never started
                    api.delete_ray_job(self.name, uid=job["metadata"].get("uid"))
                elif job_status == "Running" and _has_lost_its_head(api, status):
                    _LOG.warning("the head of the run's Ray cluster is gone: it is created again")
                    api.delete_ray_job(self.name, uid=job["metadata"].get("uid"))
                    job_status = "Deleting"
                elif job_status == "Running":
                    return f"{status['dashboardURL'].rpartition(':')[0]}:{_PORT}"
                if time.monotonic() >= deadline:
                    raise ResourceError(
                        f"the Ray cluster of the run, RayJob {self.name}, does not run",
                        expected=f"all of its pods within {wait_seconds:.0f} s",
                        got=f"{job_status or 'no'} status {status.get('message', '')}".strip(),
                        fix="look at its pods (kubectl describe pod): no machine of that kind "
                        "is free, or the image cannot be pulled",
                    )
                time.sleep(pause_seconds)

    def manifest(self, own_pod: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the RayJob; its pods inherit Flyte's settings and end with the execution."""
        spec = cluster_spec(
            self.head,
            self.workers,
            container=inherited.container_settings(own_pod),
            spec=inherited.spec_settings(own_pod),
        )
        spec["headGroupSpec"]["serviceType"] = "ClusterIP"  # no port of the machines leads to it
        keeper = ["python", "-c", _KEEPER.read_text(), TURNS, TURN, str(IDLE_SECONDS)]
        owners = own_pod["metadata"].get("ownerReferences", [])
        metadata = inherited.job_metadata(own_pod)
        return {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {
                "name": self.name,
                **metadata,
                "labels": {**metadata["labels"], EXECUTION_LABEL: _label()},
                "ownerReferences": [{key: each[key] for key in _KEPT_OF_OWNERS} for each in owners],
            },
            "spec": {
                "entrypoint": shlex.join(keeper),
                # KubeRay submits the job itself, without a further pod.
                "submissionMode": "HTTPMode",
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": 0,
                "rayClusterSpec": spec,
            },
        }


def give_back(api: RayJobApi) -> list[str]:
    """Removes the Ray clusters of this container's run; returns the names of their RayJobs."""
    names = api.ray_jobs(f"{EXECUTION_LABEL}={_label()}")
    for name in names:
        api.delete_ray_job(name)
    return names


def _has_lost_its_head(api: RayJobApi, status: Mapping[str, Any]) -> bool:
    """Whether the head is gone: KubeRay 1.5.1 does not replace it, and stays `Running`."""
    head = ((status.get("rayClusterStatus") or {}).get("head") or {}).get("podName")
    return head is not None and not api.has_pod(head)


def _execution() -> str:
    return os.environ["FLYTE_INTERNAL_EXECUTION_ID"]


def _label() -> str:
    return _execution()[:63]
