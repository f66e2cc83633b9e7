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
        container: Laid over the container that Ray runs in, as its image; lists grow.
        spec: Laid over each pod's spec.
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
    main = own["containers"][0]
    for key, value in container.items():
        main[key] = [*main.get(key, []), *value] if isinstance(value, list) else value
    own["containers"][0] = dict(sorted(main.items()))
    metadata: dict[str, Any] = {"labels": template.labels}
    if template.annotations:
        metadata["annotations"] = template.annotations
    return {"metadata": metadata, "spec": {**own, **spec}}
