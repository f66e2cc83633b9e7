"""Rights of an account, as the API server reports them."""

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
    """Returns the verbs that a user may use in a namespace, by group and resource."""
    verbs: dict[tuple[str, str], set[str]] = {}
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    for (group, path), verb in itertools.product(RESOURCES, VERBS):
        resource, _, subresource = path.partition("/")
        attributes = {"group": group, "resource": resource, "subresource": subresource}
        attributes |= {"verb": verb, "namespace": "" if resource == "nodes" else namespace}
        spec = {"resourceAttributes": attributes}
        url = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        if api.request("POST", url, {**kind, "spec": spec})["status"]["allowed"]:
            verbs.setdefault((group, path), set()).add(verb)
    return verbs
