"""The `spec` of a RayCluster, built from the pod templates of stages."""

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
    """Returns a RayCluster with a fixed number of pods.

    Args:
        container: Additions to the container that Ray runs in, such as its image. Fields of a
            template are kept; its lists and maps get the entries that they lack, by name.
        spec: Additions to each pod's spec, in the same way.
    """

    from kubernetes.client import ApiClient

    def pod(template: PodTemplate) -> dict[str, Any]:
        pod_spec: dict[str, Any] = ApiClient().sanitize_for_serialization(template.pod_spec)  # type: ignore[no-untyped-call]
        pod_spec["containers"][0] = dict(
            sorted(_filled(pod_spec["containers"][0], container).items())
        )
        metadata: dict[str, Any] = {"labels": template.labels}
        if template.annotations:
            metadata["annotations"] = template.annotations
        return {"metadata": metadata, "spec": _filled(pod_spec, spec or {})}

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


def _filled(existing: Mapping[str, Any], additional: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the existing fields, and the additional ones that are missing.

    Kubernetes allows a name once in a list; if one is given twice, the last counts, as for the
    variables of a container.
    """
    filled = {**additional, **existing}
    for key in existing.keys() & additional.keys():
        if isinstance(existing[key], list):
            names = [_name(each) for each in existing[key]]
            new = {str(_name(each)): each for each in additional[key] if _name(each) not in names}
            filled[key] = [*existing[key], *new.values()]
        elif isinstance(existing[key], dict):
            filled[key] = {**additional[key], **existing[key]}
    return filled


def _name(entry: Mapping[str, Any]) -> Any:
    return entry.get("name") or entry
