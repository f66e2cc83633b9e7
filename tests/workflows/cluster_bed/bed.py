"""Stand-in for Flyte's propeller: runs a task in a pod, or as a RayJob if it has workers.

Pods reach Kubernetes' API, with which stages create RayJobs themselves.
"""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from flyteidl.core import tasks_pb2

from tasks.pods.pods import NODE, STORE_CLAIM
from tests.workflows.cluster_bed.kuberay import RayJob, cluster_of_manifest, cluster_of_task
from tests.workflows.cluster_bed.kubernetes_server import KubernetesServer
from tests.workflows.cluster_bed.network import Network
from tests.workflows.cluster_bed.pod import Pod
from tests.workflows.flyte_backend import Backend
from tests.workflows.flyte_backend.buckets import S3Bucket
from tests.workflows.flyte_backend.containers import Container, ContainerError, pod_spec_of

Fault = Literal["volume not shared", "bucket without rights", "no right to RayJobs", "no operator"]

_FORBIDDEN = (  # Kubernetes' answer, as Flyte forwards it
    'rayjobs.ray.io is forbidden: User "system:serviceaccount:flyte:flyte-binary" cannot create '
    'resource "rayjobs" in API group "ray.io" in the namespace "flytesnacks-development"'
)

_MACHINE: dict[str, Any] = {
    "metadata": {"name": "machine", "labels": {}},
    "spec": {},
    "status": {"allocatable": {"cpu": "16", "memory": "120Gi", "ephemeral-storage": "400Gi"}},
}
"""The only node that Kubernetes' API lists; every pod fits on it."""


class ClusterBed:
    """Network, S3 server and volume; a context manager, and the `Machine` of a `Backend`.

    Args:
        folder: Folder on this machine for logs and the shared `volume`. The volume is emptied
            before every RayJob of a task, so that later attempts can only resume through S3.
        pods_per_worker: See `RayJob`.
        at_once: Whether nodes of a graph run in parallel; the volume is then never emptied.
        secrets: Variables that Flyte's `default-env-from-secrets` gives every pod.
        faults: Faults of this cluster to simulate.

    Attributes:
        backend: Flyte's services.
        bucket: Storage that pods share in addition to the volume.
        volume: Folder of the shared volume.
        kubernetes: The API, with the RayJobs that stages have created.
        jobs: Every RayJob of a task, in order.
        drivers: Every pod outside RayJobs that mounts the volume, in order.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pods_per_worker: int = 1,
        at_once: bool = False,
        secrets: Mapping[str, str] | None = None,
        faults: Collection[Fault] = (),
    ) -> None:
        self._network, self._pods_per_worker = Network(), pods_per_worker
        self._at_once, self._faults, self._folder = at_once, frozenset(faults), folder
        self.secrets = dict(secrets or {})
        self.volume = folder / "volume"
        self.bucket = S3Bucket(self._network.address)
        self.backend = Backend(folder / "flyte", bucket=self.bucket, machine=self, at_once=at_once)
        self.jobs: list[RayJob] = []
        self.drivers: list[Pod] = []
        self.kubernetes = KubernetesServer(folder, self._network.address, self._make_ray_job)

    def __enter__(self) -> "ClusterBed":
        self._network.__enter__()
        self._empty_volume()
        self.kubernetes.nodes.append(_MACHINE)
        self.kubernetes.__enter__()
        self.backend.__enter__()
        return self

    @property
    def address(self) -> str:
        """Address of this machine in the pods' network."""
        return self._network.address

    def __exit__(self, *_: object) -> None:
        self.backend.__exit__()
        self.kubernetes.__exit__()
        for job in self.jobs:
            job.remove()
        self._network.__exit__()

    def _empty_volume(self) -> None:
        shutil.rmtree(self.volume, ignore_errors=True)
        _make_volume(self.volume)

    def _volume_of(self, spec: Mapping[str, Any], pod: Path) -> Path | None:
        claims = [each.get("persistentVolumeClaim", {}) for each in spec.get("volumes", [])]
        if {"claimName": STORE_CLAIM} not in claims:
            return None
        if "volume not shared" in self._faults:
            _make_volume(pod / "volume")
            return pod / "volume"
        return self.volume

    def start(
        self,
        task: tasks_pb2.TaskTemplate,
        command: list[str],
        pod: Path,
        environment: Mapping[str, str],
    ) -> Container:
        """Starts a task's container; see `Machine`."""
        variables = {**environment, **self.bucket.environment, **self.secrets}
        if "bucket without rights" in self._faults:
            variables["FLYTE_AWS_ACCESS_KEY_ID"] = self.bucket.key_without_rights
        if task.type == "ray":
            if "no right to RayJobs" in self._faults:
                raise ContainerError(_FORBIDDEN, may_retry=True)
            if "no operator" in self._faults:
                return NeverStarted()
            if not self._at_once:
                self._empty_volume()
            self.jobs.append(
                RayJob(
                    self._network,
                    cluster_of_task(task),
                    command,
                    pod,
                    variables,
                    volume=self.volume,
                    pods_per_worker=self._pods_per_worker,
                )
            )
            return self.jobs[-1]
        name = task.id.name.rpartition(".")[2].replace("_", "-")
        spec = pod_spec_of(task)
        variables |= self.kubernetes.admit(name, spec, variables)
        variables |= {NODE: f"machine-of-{name}"}  # each pod of the bed counts as one machine
        volume = self._volume_of(spec, pod)
        started = Pod(
            self._network,
            name,
            command,
            variables,
            log=pod / "log",
            volume=volume,
            account=self.kubernetes.account,
        )
        if volume is not None:
            self.drivers.append(started)
        return started

    def _make_ray_job(
        self, spec: Mapping[str, Any], folder: Path, environment: Mapping[str, str]
    ) -> RayJob:
        return RayJob(
            self._network,
            cluster_of_manifest(spec["rayClusterSpec"]),
            ["sh", "-c", spec["entrypoint"]],
            folder,
            environment,
            volume=self.volume,
            pods_per_worker=self._pods_per_worker,
        )


class NeverStarted:
    """A RayJob without an operator: it gets no pods, and Flyte waits for its status."""

    pid = 0

    def poll(self) -> int | None:
        return None

    def remove(self) -> None:
        """Does nothing, as it has no pods."""


def _make_volume(folder: Path) -> None:
    folder.mkdir(parents=True)
    shutil.chown(folder, 1000, 1000)
