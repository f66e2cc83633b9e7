"""Requests of a stage to Kubernetes, with the service account of its pod."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ResourceError

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_INVALID = (400, 422)
_DENIED = "denied the request"  # by an admission webhook, such as Kueue's, with status 403


class KubernetesApi:
    """The machines of the cluster, as Kubernetes describes them."""

    def __init__(self) -> None:
        from kubernetes import config
        from kubernetes.client import CoreV1Api

        try:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise ResourceError(
                "this pod cannot reach Kubernetes",
                expected="a pod with the token of its service account",
                got=str(error),
                fix="set automountServiceAccountToken, or remove cluster.lifetime from the recipe",
            ) from error
        self._namespace = _NAMESPACE.read_text().strip()
        self._pods: Any = CoreV1Api()

    def nodes(self) -> list[dict[str, Any]]:
        """Returns the machines of the cluster, with their labels and resources."""
        with Request("list nodes", role="nemo-rl-nodes"):
            response = self._pods.list_node()
        nodes: list[dict[str, Any]] = self._pods.api_client.sanitize_for_serialization(
            response.items
        )
        return nodes


class Request:
    """Explains errors of a request, and ignores some statuses."""

    def __init__(
        self,
        request: str,
        *,
        ignored_statuses: Sequence[int] = (),
        role: str = "nemo-rl-run-clusters",
    ) -> None:
        self._request, self._role, self._ignored = request, role, ignored_statuses

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
        if status in self._ignored:
            return True
        message = " ".join(str(getattr(error, "body", None) or error).split())
        got = f"{status or 'no answer'}: {message}"
        if status in _INVALID or _DENIED in message:
            raise ResourceError(
                f"the request of a stage is invalid: Kubernetes refuses to {self._request}",
                expected="an object that the API server, KubeRay's definitions and webhooks take",
                got=got,
                fix="correct the named fields in deployment/pods.yaml and register again; "
                "fields that are not in that file are a bug of this project",
            ) from error
        raise ResourceError(
            f"Kubernetes does not let the account of this pod {self._request}",
            expected=f"the role {self._role} of deployment/production/cluster.yaml",
            got=got,
            fix="apply that file to the namespace again"
            + (", or remove cluster.lifetime" if self._role == "nemo-rl-run-clusters" else ""),
        ) from error
