"""What Flyte's propeller does with a stage that has workers: it asks for a RayJob, and looks.

With the account that Flyte has there, and the RayJob that its plugin makes (`tests/schemas`).
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
        bed: Started.
        folder: Of this machine.

    Attributes:
        bucket: What pods have in common beside the volume.
        backend: Flyte's services; none of it is asked for.
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
        given = tasks_pb2.TaskTemplate()
        given.CopyFrom(task)
        given.container.args[:] = command
        known = {each.key: each.value for each in given.container.env}
        own = {**known, **environment, **self.bucket.environment}
        del given.container.env[:]  # Kubernetes refuses a RayJob in which a name stands twice
        for name, value in own.items():
            given.container.env.add(key=name, value=value)
        job = ray_job(given)
        job["metadata"]["name"] = f"stage-n0-{len(self.jobs)}"
        self._api.create(job, NAMESPACE)
        self.jobs.append(StartedRayJob(self._bed, self._api, job["metadata"]["name"], pod))
        return self.jobs[-1]


class StartedRayJob:
    """A `Container`, as far as Flyte sees of a RayJob.

    Attributes:
        name: Of the RayJob.
        pid: None that this machine could count.
    """

    pid = 0

    def __init__(self, bed: KubernetesBed, api: Api, name: str, folder: Path) -> None:
        self._bed, self._api, self.name, self._folder = bed, api, name, folder

    @property
    def status(self) -> dict[str, Any]:
        """Of the RayJob."""
        found: dict[str, Any] = self._api.get(f"{RAY_JOBS}/{self.name}").get("status") or {}
        return found

    def poll(self) -> int | None:
        """0 for `Complete` and 1 for `Failed`; None while it runs."""
        code = {"Complete": 0, "Failed": 1}.get(self.status.get("jobDeploymentStatus", ""))
        if code is not None:
            logs = self._bed.logs(self.name)
            (self._folder / "log").write_text("".join(logs[each] for each in sorted(logs)))
        return code

    def remove(self) -> None:
        """Leaves it to the operator, as Flyte does: the RayJob goes with the execution."""
