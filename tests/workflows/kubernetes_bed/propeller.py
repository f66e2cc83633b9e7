"""Stand-in for Flyte's propeller, which runs a stage with workers as a RayJob and polls it.

It uses Flyte's account in the cluster and the RayJob that Flyte's plugin makes (`tests/schemas`).
"""

from pathlib import Path
from typing import Any

from flyteidl.core import tasks_pb2

from tests.schemas.ray_job import ray_job
from tests.workflows.flyte_backend import Backend
from tests.workflows.flyte_backend.buckets import S3Bucket
from tests.workflows.kubernetes_bed.api import Api
from tests.workflows.kubernetes_bed.bed import FLYTE, NAMESPACE, KubernetesBed

RAY_JOBS = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs"


class Propeller:
    """The `Machine` of a `SingleStage`; a context manager.

    Args:
        bed: A started bed.
        folder: Folder on this machine for the backend.

    Attributes:
        bucket: Storage that pods share in addition to the volume.
        backend: Flyte's services, which a `SingleStage` does not call.
        jobs: Every RayJob, in order.
    """

    def __init__(self, bed: KubernetesBed, folder: Path) -> None:
        self._bed = bed
        self.bucket = S3Bucket(bed.network.address)
        self.backend = Backend(folder / "flyte", bucket=self.bucket, machine=self)
        self.jobs: list[StartedRayJob] = []
        self._api = bed.plane.as_account(*FLYTE)

    def __enter__(self) -> "Propeller":
        self.backend.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.__exit__()

    def start(
        self,
        task: tasks_pb2.TaskTemplate,
        command: list[str],
        pod: Path,
        environment: dict[str, str],
    ) -> "StartedRayJob":
        """Starts a task's container; see `Machine`."""
        template = tasks_pb2.TaskTemplate()
        template.CopyFrom(task)
        template.container.args[:] = command
        variables = {each.key: each.value for each in template.container.env}
        variables |= {**environment, **self.bucket.environment}
        del template.container.env[:]  # Kubernetes refuses a RayJob with a repeated variable
        for name, value in variables.items():
            template.container.env.add(key=name, value=value)
        job = ray_job(template)
        job["metadata"]["name"] = f"stage-n0-{len(self.jobs)}"
        self._api.create(job, NAMESPACE)
        self.jobs.append(StartedRayJob(self._bed, self._api, job["metadata"]["name"], pod))
        return self.jobs[-1]


class StartedRayJob:
    """A RayJob with the interface of a `Container`, from what Flyte can see of it.

    Attributes:
        name: Name of the RayJob.
        pid: Always 0, as no process of this machine corresponds to it.
    """

    pid = 0

    def __init__(self, bed: KubernetesBed, api: Api, name: str, folder: Path) -> None:
        self._bed, self._api, self.name, self._folder = bed, api, name, folder

    @property
    def status(self) -> dict[str, Any]:
        """Status of the RayJob."""
        status: dict[str, Any] = self._api.get(f"{RAY_JOBS}/{self.name}").get("status") or {}
        return status

    def poll(self) -> int | None:
        """Returns 0 for `Complete`, 1 for `Failed`, and None while it runs."""
        code = {"Complete": 0, "Failed": 1}.get(self.status.get("jobDeploymentStatus", ""))
        if code is not None:
            logs = self._bed.logs(self.name)
            (self._folder / "log").write_text("".join(logs[each] for each in sorted(logs)))
        return code

    def remove(self) -> None:
        """Does nothing: as on Flyte, the operator removes the RayJob with its execution."""
