"""The `spec` of a RayCluster, of the pod templates that stages have."""

from collections.abc import Mapping, Sequence
from typing import Any

from flytekit import PodTemplate
from flytekitplugins.ray import HeadNodeConfig, WorkerNodeConfig


def cluster_spec(
    head: HeadNodeConfig,
    workers: Sequence[WorkerNodeConfig],
    *,
    container: Mapping[str, Any],
    spec: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A RayCluster of a fixed number of pods.

    Args:
        head: Of the pod that runs no workers.
        workers: A group for each size of machine.
        container: Of the container that Ray runs in, such as its image. What a template has of its
            own stays; its lists and maps grow by what they do not have, by name.
        spec: Of each pod's spec, likewise.
    """

    def pod(template: PodTemplate) -> dict[str, Any]:
        return _pod(template, container, spec or {})

    return {
        "enableInTreeAutoscaling": False,
        "headGroupSpec": {
            "rayStartParams": {**head.ray_start_params, "dashboard-host": "0.0.0.0"},
            "template": pod(head.pod_template),
        },
        "workerGroupSpecs": [
            {
                "groupName": group.group_name,
                "replicas": group.replicas,
                "minReplicas": group.replicas,
                "maxReplicas": group.replicas,
                "rayStartParams": {},
                "template": pod(group.pod_template),
            }
            for group in workers
        ],
    }


def _pod(
    template: PodTemplate, container: Mapping[str, Any], spec: Mapping[str, Any]
) -> dict[str, Any]:
    from kubernetes.client import ApiClient

    client = ApiClient()
    own: dict[str, Any] = client.sanitize_for_serialization(template.pod_spec)  # type: ignore[no-untyped-call]
    own["containers"][0] = dict(sorted(_filled(own["containers"][0], container).items()))
    metadata: dict[str, Any] = {"labels": template.labels}
    if template.annotations:
        metadata["annotations"] = template.annotations
    return {"metadata": metadata, "spec": _filled(own, spec)}


def _filled(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is there, and what is given besides.

    Kubernetes takes no name twice in a list; of two that are given the last one counts, as for a
    container's variables.
    """
    filled = {**given, **own}
    for key in own.keys() & given.keys():
        if isinstance(own[key], list):
            names = [_name(each) for each in own[key]]
            new = {str(_name(each)): each for each in given[key] if _name(each) not in names}
            filled[key] = [*own[key], *new.values()]
        elif isinstance(own[key], dict):
            filled[key] = {**given[key], **own[key]}
    return filled


def _name(entry: Mapping[str, Any]) -> Any:
    """That of a variable; an entry of a list without names is the whole of it."""
    return entry.get("name") or entry
