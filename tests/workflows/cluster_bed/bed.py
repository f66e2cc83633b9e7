"""What Flyte's propeller does with a task: a pod for a plain one, a RayJob for one with workers.

Pods reach Kubernetes' API, by which stages make a RayJob of their own.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyteidl.core import tasks_pb2

from tests.workflows.cluster_bed.kuberay import RayJob, cluster_of_manifest, cluster_of_task
from tests.workflows.cluster_bed.kubernetes_server import KubernetesServer
from tests.workflows.cluster_bed.network import Network
from tests.workflows.cluster_bed.pod import Pod
from tests.workflows.flyte_backend import Backend
from tests.workflows.flyte_backend.buckets import S3Bucket
from tests.workflows.flyte_backend.containers import Container, pod_spec_of


class ClusterBed:
    """Network, S3 server and volume; a context manager, and the `Machine` of a `Backend`.

    Args:
        folder: Of this machine: `volume` is the shared one, empty for every RayJob of a task, so
            that what a later attempt knows came through S3; other files are logs.
        pods_per_worker: See `RayJob`.

    Attributes:
        backend: Flyte's services.
        bucket: What pods have in common beside the volume.
        volume: The shared one.
        kubernetes: The API, with the RayJobs that stages have asked for.
        jobs: Every RayJob of a task, in order.
        drivers: Every pod with the volume that is of no RayJob, in order.
    """

    def __init__(self, folder: Path, *, pods_per_worker: int = 1) -> None:
        self._network, self._pods_per_worker = Network(), pods_per_worker
        self.volume = folder / "volume"
        self.bucket = S3Bucket(self._network.address)
        self.backend = Backend(folder / "flyte", bucket=self.bucket, machine=self)
        self.jobs: list[RayJob] = []
        self.drivers: list[Pod] = []
        self.kubernetes = KubernetesServer(folder, self._network.address, self._make_ray_job)

    def __enter__(self) -> "ClusterBed":
        self._network.__enter__()
        self._empty_volume()
        self.kubernetes.__enter__()
        self.backend.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.__exit__()
        self.kubernetes.__exit__()
        for job in self.jobs:
            job.remove()
        self._network.__exit__()

    def _empty_volume(self) -> None:
        shutil.rmtree(self.volume, ignore_errors=True)
        self.volume.mkdir(parents=True)
        shutil.chown(self.volume, 1000, 1000)

    def start(
        self,
        task: tasks_pb2.TaskTemplate,
        command: list[str],
        pod: Path,
        environment: Mapping[str, str],
    ) -> Container:
        """Starts a task's container; see `Machine`."""
        own = {**environment, **self.bucket.environment}
        if task.type == "ray":
            self._empty_volume()
            self.jobs.append(
                RayJob(
                    self._network,
                    cluster_of_task(task),
                    command,
                    pod,
                    own,
                    volume=self.volume,
                    pods_per_worker=self._pods_per_worker,
                )
            )
            return self.jobs[-1]
        name = task.id.name.rpartition(".")[2].replace("_", "-")
        spec = pod_spec_of(task)
        own |= self.kubernetes.admit(name, spec, own)
        has_volume = any("persistentVolumeClaim" in each for each in spec.get("volumes", []))
        started = Pod(
            self._network,
            name,
            command,
            own,
            log=pod / "log",
            volume=self.volume if has_volume else None,
            account=self.kubernetes.account,
        )
        if has_volume:
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
