"""The RayJob that Flyte creates for a task: `constructRayJob` of its Ray plugin, in Python.

Translated from flyteplugins/go/tasks/plugins/k8s/ray/ray.go and the plugin manager of Flyte 1.16.8,
with the plugin configuration of `deployment/production/values-s3.yaml`, without owner references
and additions from other configuration (tolerations, selectors, environment).
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
    """Returns the object that Flyte creates in Kubernetes.

    Args:
        task: Registered task of the type `ray`.
        execution_labels: Labels of the execution or its launch plan, which Flyte puts on every
            object.
    """
    custom = with_integers(json_format.MessageToDict(task.custom))
    cluster, labels = custom["rayCluster"], dict(execution_labels or {})
    base = _container(task)
    head = cluster["headGroupSpec"]
    metadata = task.metadata.metadata
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {
            "name": "f0123456789abcdef-n0-0",
            "labels": {**metadata.labels, **labels},
            "annotations": dict(metadata.annotations),
        },
        "spec": {
            "entrypoint": " ".join(argument or "''" for argument in task.container.args),
            "shutdownAfterJobFinishes": custom.get("shutdownAfterJobFinishes", False),
            "ttlSecondsAfterFinished": custom.get("ttlSecondsAfterFinished", 0),
            "runtimeEnvYAML": custom.get("runtimeEnvYaml", ""),
            "submitterPodTemplate": _pod([base], {}, labels),
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
                    "template": _group("ray-head", base, head, labels),
                },
                "workerGroupSpecs": [
                    _workers(base, group, labels) for group in cluster["workerGroupSpec"]
                ],
            },
        },
    }


def with_integers(value: Any) -> Any:
    """Converts integral floats to integers: all numbers of a struct are floats."""
    if isinstance(value, dict):
        return {key: with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_integers(item) for item in value]
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
    requests = {names[entry.name]: entry.value for entry in container.resources.requests}
    return {
        "name": "f0123456789abcdef-n0-0",
        "image": container.image,
        "args": list(container.args),
        "env": [{"name": entry.key, "value": entry.value} for entry in container.env],
        "resources": {"requests": requests, "limits": requests},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _group(
    name: str, base: dict[str, Any], group: Mapping[str, Any], labels: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the pod of the task's specification, merged with the template of the group."""
    template = group["k8sPod"]
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    container = {
        **base,
        "name": name,
        "args": [],
        "env": [*base["env"], {"name": "MY_POD_IP", "valueFrom": address}],
        "ports": _PORTS,
    }
    # mergo.WithOverride and WithAppendSlice; containers are merged by name.
    overlay = dict(template["podSpec"])
    containers = {item["name"]: item for item in overlay.pop("containers")}
    merged = merge(container, containers.get(name, {}))
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


def merge(base: Any, overlay: Any) -> Any:
    """Merges like mergo: maps are merged, lists are appended, other values replaced."""
    if isinstance(base, dict) and isinstance(overlay, dict):
        both = {key: merge(base[key], overlay[key]) for key in base.keys() & overlay.keys()}
        return {**base, **overlay, **both}
    if isinstance(base, list) and isinstance(overlay, list):
        return [*base, *overlay]
    return overlay
