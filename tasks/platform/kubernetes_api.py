"""What a stage asks Kubernetes for, with the service account of its pod."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ResourceError
from tasks.platform.pods import POD_NAME

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_NOT_FOUND, _CONFLICT = 404, 409
_INVALID = (400, 422)
_DENIED = "denied the request"  # of an admission webhook, such as Kueue's, with the status 403
_RAY_JOBS = {"group": "ray.io", "version": "v1", "plural": "rayjobs"}

RUN_CLUSTER_RIGHTS = {
    ("ray.io", "rayjobs"): ("create", "delete", "get", "list"),
    ("", "pods"): ("get",),
}
"""Verbs on resources of the namespace, by group and name, for stages with `lifetime: run`."""


class KubernetesApi:
    """The RayJobs of the pod's own namespace, and the machines of the cluster.

    Raises:
        ResourceError: If this is no pod, or Kubernetes refuses a request; so do all methods.
    """

    def __init__(self) -> None:
        from kubernetes import config
        from kubernetes.client import AuthorizationV1Api, CoreV1Api, CustomObjectsApi

        try:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise ResourceError(
                "a pod that asks Kubernetes for something cannot reach it",
                expected="a pod with the token of its service account",
                got=str(error),
                fix="set automountServiceAccountToken, or remove cluster.lifetime from the recipe",
            ) from error
        self._namespace = _NAMESPACE.read_text().strip()
        self._ray_jobs: dict[str, Any] = {**_RAY_JOBS, "namespace": self._namespace}
        self._pods: Any = CoreV1Api()
        self._objects: Any = CustomObjectsApi()
        self._rights: Any = AuthorizationV1Api()

    def own_pod(self) -> dict[str, Any]:
        """This pod, with what Flyte has given it."""
        with _Request("get pods"):
            found = self._pods.read_namespaced_pod(os.environ[POD_NAME], self._namespace)
        pod: dict[str, Any] = self._pods.api_client.sanitize_for_serialization(found)
        return pod

    def has_pod(self, name: str) -> bool:
        """Whether there is a pod of that name that has not ended and is not being removed."""
        with _Request("get pods", but=(_NOT_FOUND,)):
            pod = self._pods.read_namespaced_pod(name, self._namespace)
            is_leaving = pod.metadata.deletion_timestamp is not None
            return not is_leaving and pod.status.phase in ("Pending", "Running")
        return False

    def ray_job(self, name: str) -> dict[str, Any] | None:
        """The RayJob of that name; None if there is none."""
        with _Request("get rayjobs", but=(_NOT_FOUND,)):
            job: dict[str, Any] = self._objects.get_namespaced_custom_object(
                name=name, **self._ray_jobs
            )
            return job
        return None

    def ray_jobs(self, selector: str) -> list[str]:
        """The names of the RayJobs with such labels."""
        with _Request("list rayjobs"):
            found = self._objects.list_namespaced_custom_object(
                label_selector=selector, **self._ray_jobs
            )
        return [each["metadata"]["name"] for each in found["items"]]

    def create_ray_job(self, body: dict[str, Any]) -> None:
        """Makes a RayJob; there may be one of its name already."""
        with _Request("create rayjobs", but=(_CONFLICT,)):
            self._objects.create_namespaced_custom_object(body=body, **self._ray_jobs)

    def delete_ray_job(self, name: str, *, uid: str | None = None) -> None:
        """Removes a RayJob and its pods; it may be gone already.

        Args:
            name: Of the RayJob.
            uid: Of the one that was looked at. Another of this name, which another stage has made
                since, stays. None removes any.
        """
        found = {"preconditions": {"uid": uid}} if uid else {}
        with _Request("delete rayjobs", but=(_NOT_FOUND, _CONFLICT)):
            self._objects.delete_namespaced_custom_object(name=name, body=found, **self._ray_jobs)

    def missing_rights(self) -> list[str]:
        """Which of `RUN_CLUSTER_RIGHTS` the pod's account lacks, as `create rayjobs`."""
        from kubernetes import client

        missing = []
        for (group, resource), verbs in RUN_CLUSTER_RIGHTS.items():
            for verb in verbs:
                asked = client.V1ResourceAttributes(
                    group=group, resource=resource, verb=verb, namespace=self._namespace
                )
                spec = client.V1SelfSubjectAccessReviewSpec(resource_attributes=asked)
                review = client.V1SelfSubjectAccessReview(spec=spec)
                with _Request("create selfsubjectaccessreviews", role="system:basic-user"):
                    found = self._rights.create_self_subject_access_review(review)
                if not found.status.allowed:
                    missing.append(f"{verb} {resource}")
        return missing

    def nodes(self) -> list[dict[str, Any]]:
        """The machines of the cluster, with their labels and resources."""
        with _Request("list nodes", role="nemo-rl-nodes"):
            found = self._pods.list_node()
        nodes: list[dict[str, Any]] = self._pods.api_client.sanitize_for_serialization(found.items)
        return nodes


class _Request:
    """Explains errors of a request, and passes over one status.

    Args:
        request: Verb and resource.
        but: Statuses of answers that are no errors here.
        role: Of `deployment/production/cluster.yaml`, which allows the request.
    """

    def __init__(
        self, request: str, *, but: Sequence[int] = (), role: str = "nemo-rl-run-clusters"
    ) -> None:
        self._request, self._but, self._role = request, but, role

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> bool:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        if not isinstance(error, ApiException | HTTPError):
            return False
        status = getattr(error, "status", None)
        if status in self._but:
            return True
        said = " ".join(str(getattr(error, "body", None) or error).split())
        got = f"{status or 'no answer'}: {said}"
        if status in _INVALID or _DENIED in said:
            raise ResourceError(
                f"what a stage asks for is invalid: Kubernetes does not {self._request}",
                expected="an object that the API server, KubeRay's definitions and webhooks take",
                got=got,
                fix="correct what it names in deployment/pods.yaml and register again; "
                "what is not of that file is a fault of this project",
            ) from error
        raise ResourceError(
            f"Kubernetes does not {self._request} for the account of this pod",
            expected=f"the role {self._role} of deployment/production/cluster.yaml",
            got=got,
            fix="apply that file to the namespace again"
            + ", or remove cluster.lifetime" * (self._role == "nemo-rl-run-clusters"),
        ) from error
