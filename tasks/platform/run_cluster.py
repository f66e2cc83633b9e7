"""The Ray cluster that all stages of a run share (`cluster.lifetime: run`), as a RayJob.

Flyte's Ray plugin makes a RayJob for each task, and cannot name the cluster of another one. So the
first stage that has something to do asks Kubernetes for a RayJob that runs nothing but a program
that waits (`cluster_keeper.py`); KubeRay takes the cluster down when that program ends. Stages are
plain pods, which join it (`joining.py`).
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
from tasks.platform import taken_over
from tasks.platform.joining import TURN, TURNS
from tasks.platform.kubernetes_api import KubernetesApi
from tasks.platform.ray_manifest import cluster_spec

_LOG = logging.getLogger(f"nemo_rl_core.{__name__}")  # the run's log takes this one's

EXECUTION_LABEL = "nemo-rl-flow/execution"
"""Label of a RayJob with the run that it belongs to."""

IDLE_SECONDS = 300
"""A cluster that no stage has used for so long is given back; a later stage makes another."""

_WAIT_SECONDS = 2 * 3600.0
_PORT = 6379
_LONGEST_NAME = 47  # KubeRay derives longer ones from it
_KEEPER = Path(__file__).with_name("cluster_keeper.py")
_KEPT_OF_OWNERS = ("apiVersion", "kind", "name", "uid")


@dataclass(frozen=True)
class RunCluster:
    """The cluster of one shape of the run that this container belongs to.

    Attributes:
        shape: The shape's name: stages of another one have another cluster.
        head: Of the pod that runs no workers.
        workers: A group for each size of machine.
    """

    shape: str
    head: HeadNodeConfig
    workers: Sequence[WorkerNodeConfig]

    @cached_property
    def name(self) -> str:
        """Of the RayJob: the same in every stage of the run that has this shape."""
        shape = hashlib.sha256(self.shape.encode()).hexdigest()[:8]
        name = f"nemo-rl-{_execution()}-{shape}"
        if len(name) <= _LONGEST_NAME:
            return name
        return f"nemo-rl-{hashlib.sha256(_execution().encode()).hexdigest()[:20]}-{shape}"

    def address(
        self, api: KubernetesApi, *, wait_seconds: float = _WAIT_SECONDS, pause_seconds: float = 2.0
    ) -> str:
        """Makes the cluster if there is none, and waits until its pods run.

        Returns:
            Host and port of the head.

        Raises:
            ResourceError: If it does not run within the time, or Kubernetes refuses it.
        """
        deadline = time.monotonic() + wait_seconds
        with waiting("waiting for the run's Ray cluster"):
            while True:
                job = api.ray_job(self.name)
                status = (job or {}).get("status") or {}
                how = status.get("jobDeploymentStatus", "")
                if job is None:
                    _LOG.info("the run's Ray cluster is made: RayJob %s", self.name)
                    api.create_ray_job(self.manifest(api.own_pod()))
                elif job["metadata"].get("deletionTimestamp"):
                    how = "Deleting"  # its name is free when its pods are gone
                elif how in ("Complete", "Failed"):  # it was given back, or never came up
                    api.delete_ray_job(self.name, uid=job["metadata"].get("uid"))
                elif how == "Running" and _has_lost_its_head(api, status):
                    _LOG.warning("the head of the run's Ray cluster is gone: it is made again")
                    api.delete_ray_job(self.name, uid=job["metadata"].get("uid"))
                    how = "Deleting"
                elif how == "Running":
                    return f"{status['dashboardURL'].rpartition(':')[0]}:{_PORT}"
                if time.monotonic() >= deadline:
                    raise ResourceError(
                        f"the Ray cluster of the run, RayJob {self.name}, does not run",
                        expected=f"all of its pods within {wait_seconds:.0f} s",
                        got=f"{how or 'no'} status {status.get('message', '')}".strip(),
                        fix="look at its pods (kubectl describe pod): no machine of the asked kind "
                        "is free, or the image cannot be pulled",
                    )
                time.sleep(pause_seconds)

    def manifest(self, own_pod: Mapping[str, Any]) -> dict[str, Any]:
        """The RayJob.

        Args:
            own_pod: This pod, as Kubernetes describes it. The cluster's pods get what Flyte has
                given to it, and are removed with the Flyte execution that owns it.
        """
        spec = cluster_spec(
            self.head,
            self.workers,
            container=taken_over.of_container(own_pod),
            spec=taken_over.of_spec(own_pod),
        )
        spec["headGroupSpec"]["serviceType"] = "ClusterIP"  # no port of the machines leads to it
        keeper = ["python", "-c", _KEEPER.read_text(), TURNS, TURN, str(IDLE_SECONDS)]
        owners = own_pod["metadata"].get("ownerReferences", [])
        metadata = taken_over.of_metadata(own_pod)
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
                # KubeRay itself submits: no pod beside the cluster's has to stay.
                "submissionMode": "HTTPMode",
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": 0,
                "rayClusterSpec": spec,
            },
        }


def give_back(api: KubernetesApi) -> list[str]:
    """Removes the Ray clusters of this container's run.

    Returns:
        The names of their RayJobs.

    Raises:
        ResourceError: If Kubernetes refuses it.
    """
    names = api.ray_jobs(f"{EXECUTION_LABEL}={_label()}")
    for name in names:
        api.delete_ray_job(name)
    return names


def _has_lost_its_head(api: KubernetesApi, status: Mapping[str, Any]) -> bool:
    """KubeRay 1.5.1 replaces no head of a RayJob, which stays `Running` in the mode `HTTPMode`."""
    head = ((status.get("rayClusterStatus") or {}).get("head") or {}).get("podName")
    return head is not None and not api.has_pod(head)


def _execution() -> str:
    return os.environ["FLYTE_INTERNAL_EXECUTION_ID"]


def _label() -> str:
    """Values of labels have at most 63 characters, as names of executions have."""
    return _execution()[:63]
