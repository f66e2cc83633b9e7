"""Requests of a stage for the RayJob that the stages of its run share."""

import os
from typing import Any

from tasks.pods.pods import POD_NAME
from tasks.ray_cluster.kubernetes_api import KubernetesApi, Request

_NOT_FOUND, _CONFLICT = 404, 409
_RAY_JOBS = {"group": "ray.io", "version": "v1", "plural": "rayjobs"}

RUN_CLUSTER_RIGHTS = {
    ("ray.io", "rayjobs"): ("create", "delete", "get", "list"),
    ("", "pods"): ("get",),
}
"""Verbs on resources of the namespace, by group and name, for stages with `lifetime: run`."""


class RayJobApi(KubernetesApi):
    """The RayJobs of the pod's own namespace."""

    def __init__(self) -> None:
        from kubernetes.client import AuthorizationV1Api, CustomObjectsApi

        super().__init__()
        self._ray_jobs: dict[str, Any] = {**_RAY_JOBS, "namespace": self._namespace}
        self._objects: Any = CustomObjectsApi()
        self._rights: Any = AuthorizationV1Api()

    def own_pod(self) -> dict[str, Any]:
        """Returns this pod, with the settings from Flyte."""
        with Request("get pods"):
            response = self._pods.read_namespaced_pod(os.environ[POD_NAME], self._namespace)
        pod: dict[str, Any] = self._pods.api_client.sanitize_for_serialization(response)
        return pod

    def has_pod(self, name: str) -> bool:
        """Whether there is a pod of that name that has not ended and is not being removed."""
        with Request("get pods", ignored_statuses=(_NOT_FOUND,)):
            pod = self._pods.read_namespaced_pod(name, self._namespace)
            is_leaving = pod.metadata.deletion_timestamp is not None
            return not is_leaving and pod.status.phase in ("Pending", "Running")
        return False

    def ray_job(self, name: str) -> dict[str, Any] | None:
        """Returns the RayJob of that name; None if there is none."""
        with Request("get rayjobs", ignored_statuses=(_NOT_FOUND,)):
            job: dict[str, Any] = self._objects.get_namespaced_custom_object(
                name=name, **self._ray_jobs
            )
            return job
        return None

    def ray_jobs(self, selector: str) -> list[str]:
        """Returns the names of the RayJobs with such labels."""
        with Request("list rayjobs"):
            response = self._objects.list_namespaced_custom_object(
                label_selector=selector, **self._ray_jobs
            )
        return [each["metadata"]["name"] for each in response["items"]]

    def create_ray_job(self, body: dict[str, Any]) -> None:
        """Creates a RayJob; one with its name may exist already."""
        with Request("create rayjobs", ignored_statuses=(_CONFLICT,)):
            self._objects.create_namespaced_custom_object(body=body, **self._ray_jobs)

    def delete_ray_job(self, name: str, *, uid: str | None = None) -> None:
        """Removes a RayJob and its pods; it may be gone already.

        With a uid, another RayJob with this name, which a stage has created since, is kept.
        """
        options = {"preconditions": {"uid": uid}} if uid else {}
        with Request("delete rayjobs", ignored_statuses=(_NOT_FOUND, _CONFLICT)):
            self._objects.delete_namespaced_custom_object(name=name, body=options, **self._ray_jobs)

    def missing_rights(self) -> list[str]:
        """Returns the rights of `RUN_CLUSTER_RIGHTS` that the pod's account lacks."""
        from kubernetes import client

        missing = []
        for (group, resource), verbs in RUN_CLUSTER_RIGHTS.items():
            for verb in verbs:
                attributes = client.V1ResourceAttributes(
                    group=group, resource=resource, verb=verb, namespace=self._namespace
                )
                spec = client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
                review = client.V1SelfSubjectAccessReview(spec=spec)
                with Request("create selfsubjectaccessreviews", role="system:basic-user"):
                    response = self._rights.create_self_subject_access_review(review)
                if not response.status.allowed:
                    missing.append(f"{verb} {resource}")
        return missing
