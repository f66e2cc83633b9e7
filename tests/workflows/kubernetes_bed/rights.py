"""What an account may do, as the API server says."""

import itertools

from tests.workflows.kubernetes_bed.api import Api

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
RESOURCES = (
    *(("ray.io", each) for each in ("rayjobs", "rayclusters", "rayservices", "rayjobs/status")),
    *(("", each) for each in ("pods", "pods/exec", "pods/log", "secrets", "nodes", "services")),
    *(("", each) for each in ("serviceaccounts", "persistentvolumeclaims", "resourcequotas")),
    ("batch", "jobs"),
    ("rbac.authorization.k8s.io", "rolebindings"),
    ("networking.k8s.io", "networkpolicies"),
)


def allowed(api: Api, namespace: str) -> dict[tuple[str, str], set[str]]:
    """What a user may do there, of all verbs and of many resources."""
    found: dict[tuple[str, str], set[str]] = {}
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    for (group, whole), verb in itertools.product(RESOURCES, VERBS):
        resource, _, part = whole.partition("/")
        asked = {"group": group, "resource": resource, "subresource": part}
        asked |= {"verb": verb, "namespace": "" if resource == "nodes" else namespace}
        spec = {"resourceAttributes": asked}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        if api.request("POST", path, {**kind, "spec": spec})["status"]["allowed"]:
            found.setdefault((group, whole), set()).add(verb)
    return found
