"""Pod templates of a stage's Ray cluster, for KubeRay.

All settings of a group are in its template: the Ray plugin ignores a template if there are
`requests`, and the task's own requests apply to every pod, including head and submitter.
"""

import json
from collections.abc import Mapping
from typing import Any

from flytekit import PodTemplate, Resources

from nemo_rl_core.store.node_cache import FOLDER, GIB
from tasks.pods.shapes import Nodes, Shape
from tasks.pods.site_pods import node_cache_settings, nodes_with, with_site_settings

STORE_CLAIM, STORE_FOLDER = "nemo-rl-store", "/var/nemo_rl"
"""A volume mounted by all pods of a stage: the head plans files that remote workers write."""

_STORE_VOLUME = {"name": "store", "persistentVolumeClaim": {"claimName": STORE_CLAIM}}
_STORE_MOUNT = {"name": "store", "mountPath": STORE_FOLDER}

_USER = {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}
"""The image's user; its files in the volume belong to that group."""

SECRETS = "nemo-rl-secrets"
"""Environment of every pod from an optional secret: tokens of hubs and loggers."""

NODE_CACHE_FOLDER = "/var/nemo_rl_node"
"""Mount point of the node's folder for downloads, if the site has one."""

NODE = "NEMO_RL_NODE"
"""Variable of the pods of `pod_with_store`: the name of their machine."""

STAGE_PID = "/tmp/nemo_rl_stage.pid"
"""File of the head's own disk with the id of the stage's process, while the stage runs."""

POD_NAME = "NEMO_RL_POD_NAME"
"""Variable with the pod's own name, for requests to Kubernetes."""

# The kubelet signals only the first process of a pod, and here that is Ray. The pod is ended when
# this command ends, or after the grace period. In the last seconds KubeRay's submitter sees how the
# stage has ended, and exits, which took 5 to 8 s in a test. Only after that its operator asks the
# head for the job's state, and waits for 30 s without an answer.
_STOP_IN_ORDER = (
    f"test -f {STAGE_PID} || exit 0; pid=$(cat {STAGE_PID}); kill -TERM $pid; "
    "while kill -0 $pid 2> /dev/null; do sleep 1; done; sleep 15"
)
_GRACE_SECONDS = 120

NO_DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Ray's variable for how long a terminated node waits to be drained; 0 in all pods.

By default it asks the head for that and waits 30 s, and keeps its GPUs as long if the head's pod
has ended first.
"""

SPOT = "nemo-rl/spot"
"""Taint of spot nodes; Flyte tolerates it for attempts that may run there (`values-s3.yaml`)."""

GPU = "nvidia.com/gpu"

_LABELS = {"app.kubernetes.io/part-of": "nemo-rl-flow"}
_HEAD = Resources(cpu="4", mem="32Gi", ephemeral_storage="50Gi")
_HEAD_SHARED_MEMORY_GIB = 12


DRIVER_RESOURCES = {"requests": _HEAD, "limits": _HEAD}
"""Resources of a driver's pod, as task options: flytekit prefers them over its template."""


def head_pod() -> PodTemplate:
    """Returns the pod of the stage's process, which runs the loop and holds the current batch.

    Before the pod is ended, the stage gets SIGTERM and two minutes to save its step.
    """
    return _stopped_gracefully("ray-head")


def driver_pod() -> PodTemplate:
    """Returns the pod of the same process on the Ray cluster of a run, with a separate head."""
    return _stopped_gracefully("stage", _variable(POD_NAME, "metadata.name"))


def _stopped_gracefully(container: str, *variables: dict[str, Any]) -> PodTemplate:
    spec = _spec(container, _HEAD, _HEAD_SHARED_MEMORY_GIB)
    main = spec["containers"][0]
    main["env"] = [*main.get("env", ()), *variables]
    main["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", _STOP_IN_ORDER]}}}
    spec["terminationGracePeriodSeconds"] = _GRACE_SECONDS
    return _without_drain(with_site_settings(_template(spec), "head"))


def pod_with_node_cache() -> PodTemplate | None:
    """Returns a plain task's pod with its node's cache; None if the site has no such folders."""
    if node_cache_settings() is None:
        return None
    spec = {"containers": [{"name": "primary"}], "securityContext": _USER}
    return _template(_with_node_cache(spec))


def _with_node_cache(spec: dict[str, Any]) -> dict[str, Any]:
    cache = node_cache_settings()
    if cache is None:
        return spec
    folder = {"path": cache.folder, "type": "DirectoryOrCreate"}
    mount = {"name": "node-cache", "mountPath": NODE_CACHE_FOLDER}
    variables = {FOLDER: NODE_CACHE_FOLDER, GIB: f"{cache.gib:g}"}
    env = [{"name": name, "value": value} for name, value in variables.items()]
    main = spec["containers"][0]
    main["volumeMounts"] = [*main.get("volumeMounts", ()), mount]
    main["env"] = [*main.get("env", ()), *env]
    volumes = [*spec.get("volumes", ()), {"name": "node-cache", "hostPath": folder}]
    return {**spec, "volumes": volumes}


def worker_pod(shape: Shape, nodes: Nodes) -> PodTemplate:
    """Returns the pod of one machine's workers."""
    spec = _spec("ray-worker", nodes.resources, nodes.shared_memory_gib)
    if not nodes.num_gpus:
        return _without_drain(with_site_settings(_template(spec), "worker"))
    spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if shape.accelerator:
        spec["nodeSelector"] = nodes_with(shape.accelerator)
    return _without_drain(with_site_settings(_template(spec), "worker", "gpu_worker"))


def _without_drain(template: PodTemplate) -> PodTemplate:
    from kubernetes import client

    main = template.pod_spec.containers[0]
    env = main.env or []
    if NO_DRAIN not in [each.name for each in env]:
        main.env = [*env, client.V1EnvVar(name=NO_DRAIN, value="0")]
    return template


def pod_with_store(*, spread_group: str | None = None) -> PodTemplate:
    """Returns a plain task's pod with the volume of Ray stages, for work on the volume itself.

    Pods of one `spread_group` run on different machines if there is room.
    """
    env = [_variable(NODE, "spec.nodeName")]
    container = {"name": "primary", "env": env, "volumeMounts": [_STORE_MOUNT]}
    spec = {"containers": [container], "volumes": [_STORE_VOLUME], "securityContext": _USER}
    if spread_group is None:
        return _template(spec)
    group = {"nemo-rl-flow/apart": spread_group}
    others = {"labelSelector": {"matchLabels": group}, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": others}]
    apart = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    return _template({**spec, "affinity": {"podAntiAffinity": apart}}, group)


def _spec(container: str, resources: Resources, shared_memory_gib: int) -> dict[str, Any]:
    from flytekit.core.resources import pod_spec_from_resources
    from kubernetes.client import ApiClient

    # Requests equal limits: evicting one pod of a gang for its memory ends all of them.
    reserved = pod_spec_from_resources(
        primary_container_name=container,
        requests=resources,
        limits=resources,
        k8s_gpu_resource_key=GPU,
    )
    spec = ApiClient().sanitize_for_serialization(reserved)  # type: ignore[no-untyped-call]
    shared_memory = {"medium": "Memory", "sizeLimit": f"{shared_memory_gib}Gi"}
    spec["containers"][0] |= {
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}, _STORE_MOUNT],
        "envFrom": [{"secretRef": {"name": SECRETS, "optional": True}}],
    }
    volumes = [{"name": "shared-memory", "emptyDir": shared_memory}, _STORE_VOLUME]
    return _with_node_cache({**spec, "volumes": volumes, "securityContext": _USER})


def _variable(name: str, field: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _template(spec: dict[str, Any], labels: Mapping[str, str] | None = None) -> PodTemplate:
    """Returns the template of a pod from its spec as in YAML; the first container is the task's."""
    from kubernetes.client import ApiClient

    pod_spec = ApiClient().deserialize(json.dumps(spec), "V1PodSpec", "application/json")
    name, labels = spec["containers"][0]["name"], {**_LABELS, **(labels or {})}
    return PodTemplate(primary_container_name=name, pod_spec=pod_spec, labels=labels)
