"""The RayJob that Flyte makes of a task: `constructRayJob` of its Ray plugin, in Python.

From flyteplugins/go/tasks/plugins/k8s/ray/ray.go and the plugin manager of Flyte 1.16.8, with the
plugin's configuration of `deployment/production/values-s3.yaml`. Left out are what Flyte adds by
its other configuration (tolerations, selectors, environment), and owner references.
"""

from collections.abc import Mapping
from typing import Any

from flyteidl.core import tasks_pb2
from google.protobuf import json_format

_PORTS = [
    {"name": "redis", "containerPort": 6379},
    {"name": "head", "containerPort": 10001},
    {"name": "dashboard", "containerPort": 8265},
]


def ray_job(
    task: tasks_pb2.TaskTemplate, *, execution_labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The object that Flyte asks Kubernetes for.

    Args:
        task: As it was registered, of the type `ray`.
        execution_labels: Of the execution or its launch plan, which Flyte puts on every object.
    """
    custom = whole(json_format.MessageToDict(task.custom))
    cluster, given = custom["rayCluster"], dict(execution_labels or {})
    base = _container(task)
    head = cluster["headGroupSpec"]
    own = task.metadata.metadata
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {
            "name": "f0123456789abcdef-n0-0",
            "labels": {**own.labels, **given},
            "annotations": dict(own.annotations),
        },
        "spec": {
            "entrypoint": " ".join(argument or "''" for argument in task.container.args),
            "shutdownAfterJobFinishes": custom.get("shutdownAfterJobFinishes", False),
            "ttlSecondsAfterFinished": custom.get("ttlSecondsAfterFinished", 0),
            "runtimeEnvYAML": custom.get("runtimeEnvYaml", ""),
            "submitterPodTemplate": _pod([base], {}, given),
            "rayClusterSpec": {
                "enableInTreeAutoscaling": cluster.get("enableAutoscaling", False),
                "headGroupSpec": {
                    "serviceType": "ClusterIP",
                    "enableIngress": False,
                    "rayStartParams": {
                        **head.get("rayStartParams", {}),
                        "include-dashboard": "true",
                        "node-ip-address": "$MY_POD_IP",
                        "dashboard-host": "0.0.0.0",
                        "disable-usage-stats": "true",
                    },
                    "template": _group("ray-head", base, head, given),
                },
                "workerGroupSpecs": [
                    _workers(base, each, given) for each in cluster["workerGroupSpec"]
                ],
            },
        },
    }


def whole(value: Any) -> Any:
    """A struct's numbers are floating; Go writes whole ones without a point."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _workers(
    base: dict[str, Any], group: Mapping[str, Any], labels: Mapping[str, str]
) -> dict[str, Any]:
    replicas = int(group["replicas"])
    return {
        "groupName": group["groupName"],
        "replicas": replicas,
        "minReplicas": min(int(group.get("minReplicas", 0)), replicas),
        "maxReplicas": max(int(group.get("maxReplicas", 0)), replicas),
        "rayStartParams": {
            **group.get("rayStartParams", {}),
            "node-ip-address": "$MY_POD_IP",
            "disable-usage-stats": "true",
        },
        "template": _group("ray-worker", base, group, labels),
    }


def _container(task: tasks_pb2.TaskTemplate) -> dict[str, Any]:
    container = task.container
    kinds = tasks_pb2.Resources.ResourceName
    names = {kinds.CPU: "cpu", kinds.MEMORY: "memory", kinds.GPU: "nvidia.com/gpu"}
    names[kinds.EPHEMERAL_STORAGE] = "ephemeral-storage"
    asked = {names[each.name]: each.value for each in container.resources.requests}
    return {
        "name": "f0123456789abcdef-n0-0",
        "image": container.image,
        "args": list(container.args),
        "env": [{"name": each.key, "value": each.value} for each in container.env],
        "resources": {"requests": asked, "limits": asked},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _group(
    name: str, base: dict[str, Any], group: Mapping[str, Any], labels: Mapping[str, str]
) -> dict[str, Any]:
    """A pod of the task's own specification, with the group's template laid over it."""
    template = group["k8sPod"]
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    own = {
        **base,
        "name": name,
        "args": [],
        "env": [*base["env"], {"name": "MY_POD_IP", "valueFrom": address}],
        "ports": _PORTS,
    }
    # mergo.WithOverride and WithAppendSlice; containers meet by their names.
    overlay = dict(template["podSpec"])
    containers = {each["name"]: each for each in overlay.pop("containers")}
    merged = laid_over(own, containers.get(name, {}))
    metadata = template.get("metadata", {})
    pod = _pod([merged], overlay, {**labels, **metadata.get("labels", {})})
    pod["metadata"]["annotations"] = dict(metadata.get("annotations", {}))
    return pod


def _pod(
    containers: list[dict[str, Any]], spec: Mapping[str, Any], labels: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "metadata": {"labels": dict(labels)},
        "spec": {**spec, "containers": containers, "restartPolicy": "Never"},
    }


def laid_over(base: Any, overlay: Any) -> Any:
    """As mergo does: maps are merged, lists grow, other values replace."""
    if isinstance(base, dict) and isinstance(overlay, dict):
        both = {key: laid_over(base[key], overlay[key]) for key in base.keys() & overlay.keys()}
        return {**base, **overlay, **both}
    if isinstance(base, list) and isinstance(overlay, list):
        return [*base, *overlay]
    return overlay
