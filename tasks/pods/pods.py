"""Pod templates of a stage's Ray cluster, for KubeRay.

All settings of a group are in its template: the Ray plugin ignores a template if there are
`requests`, and the task's own requests apply to every pod, including head and submitter.
"""

from typing import TYPE_CHECKING

from flytekit import PodTemplate, Resources

from nemo_rl_core.store.node_cache import FOLDER, GIB
from tasks.pods.shapes import Nodes, Shape
from tasks.pods.site_pods import node_cache_settings, nodes_with, with_site_settings

if TYPE_CHECKING:
    from kubernetes.client import (
        V1Affinity,
        V1PodSecurityContext,
        V1PodSpec,
        V1Volume,
        V1VolumeMount,
    )

STORE_CLAIM, STORE_FOLDER = "nemo-rl-store", "/var/nemo_rl"
"""A volume mounted by all pods of a stage: the head plans files that remote workers write."""

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
    from kubernetes import client

    template = _stopped_gracefully("stage")
    name = client.V1ObjectFieldSelector(field_path="metadata.name")
    source = client.V1EnvVarSource(field_ref=name)
    main = template.pod_spec.containers[0]
    main.env = [*(main.env or []), client.V1EnvVar(name=POD_NAME, value_from=source)]
    return template


def _stopped_gracefully(container: str) -> PodTemplate:
    from kubernetes import client

    template = _template(container, _HEAD, _HEAD_SHARED_MEMORY_GIB)
    stop = client.V1ExecAction(command=["sh", "-c", _STOP_IN_ORDER])
    head = template.pod_spec.containers[0]
    handler = client.V1LifecycleHandler(_exec=stop)  # type: ignore[call-arg]  # stubs: var_exec
    head.lifecycle = client.V1Lifecycle(pre_stop=handler)
    template.pod_spec.termination_grace_period_seconds = _GRACE_SECONDS
    return _without_drain(with_site_settings(template, "head"))


def pod_with_node_cache() -> PodTemplate | None:
    """Returns a plain task's pod with its node's cache; None if the site has no such folders."""
    if node_cache_settings() is None:
        return None
    from kubernetes import client

    spec = client.V1PodSpec(
        containers=[client.V1Container(name="primary")], security_context=_user()
    )
    _add_node_cache(spec)
    return PodTemplate(primary_container_name="primary", pod_spec=spec, labels=dict(_LABELS))


def _add_node_cache(spec: "V1PodSpec") -> None:
    cache = node_cache_settings()
    if cache is None:
        return
    from kubernetes import client

    folder = client.V1HostPathVolumeSource(path=cache.folder, type="DirectoryOrCreate")
    spec.volumes = [
        *(spec.volumes or []),
        client.V1Volume(name="node-cache", host_path=folder),
    ]
    main = spec.containers[0]
    mount = client.V1VolumeMount(name="node-cache", mount_path=NODE_CACHE_FOLDER)
    main.volume_mounts = [*(main.volume_mounts or []), mount]
    variables = {FOLDER: NODE_CACHE_FOLDER, GIB: f"{cache.gib:g}"}
    env = [client.V1EnvVar(name=name, value=value) for name, value in variables.items()]
    main.env = [*(main.env or []), *env]


def worker_pod(shape: Shape, nodes: Nodes) -> PodTemplate:
    """Returns the pod of one machine's workers."""
    from kubernetes.client import V1Toleration

    template = _template("ray-worker", nodes.resources, nodes.shared_memory_gib)
    if nodes.num_gpus:
        spec = template.pod_spec
        spec.tolerations = [V1Toleration(key=GPU, operator="Exists", effect="NoSchedule")]
        spec.node_selector = nodes_with(shape.accelerator) if shape.accelerator else None
        return _without_drain(with_site_settings(template, "worker", "gpu_worker"))
    return _without_drain(with_site_settings(template, "worker"))


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
    from kubernetes import client

    field = client.V1ObjectFieldSelector(field_path="spec.nodeName")
    node = client.V1EnvVar(name=NODE, value_from=client.V1EnvVarSource(field_ref=field))
    container = client.V1Container(name="primary", env=[node], volume_mounts=[_mount_of_store()])
    spec = client.V1PodSpec(
        containers=[container],
        volumes=[_volume_of_store()],
        security_context=_user(),
    )
    labels = dict(_LABELS)
    if spread_group is not None:
        labels["nemo-rl-flow/apart"] = spread_group
        spec.affinity = _away_from({"nemo-rl-flow/apart": spread_group})
    return PodTemplate(primary_container_name="primary", pod_spec=spec, labels=labels)


def _away_from(labels: dict[str, str]) -> "V1Affinity":
    from kubernetes import client

    others = client.V1PodAffinityTerm(
        label_selector=client.V1LabelSelector(match_labels=labels),
        topology_key="kubernetes.io/hostname",
    )
    preferred = client.V1WeightedPodAffinityTerm(pod_affinity_term=others, weight=100)
    return client.V1Affinity(
        pod_anti_affinity=client.V1PodAntiAffinity(
            preferred_during_scheduling_ignored_during_execution=[preferred]
        )
    )


def _template(container: str, resources: Resources, shared_memory_gib: int) -> PodTemplate:
    from flytekit.core.resources import pod_spec_from_resources
    from kubernetes import client

    # Requests equal limits: evicting one pod of a gang for its memory ends all of them.
    spec = pod_spec_from_resources(
        primary_container_name=container,
        requests=resources,
        limits=resources,
        k8s_gpu_resource_key=GPU,
    )
    spec.volumes = [
        client.V1Volume(
            name="shared-memory",
            empty_dir=client.V1EmptyDirVolumeSource(
                medium="Memory", size_limit=f"{shared_memory_gib}Gi"
            ),
        ),
        _volume_of_store(),
    ]
    main = spec.containers[0]
    main.volume_mounts = [
        client.V1VolumeMount(name="shared-memory", mount_path="/dev/shm"),
        _mount_of_store(),
    ]
    main.env_from = [
        client.V1EnvFromSource(secret_ref=client.V1SecretEnvSource(name=SECRETS, optional=True))
    ]
    spec.security_context = _user()
    _add_node_cache(spec)
    return PodTemplate(primary_container_name=container, pod_spec=spec, labels=dict(_LABELS))


def _volume_of_store() -> "V1Volume":
    from kubernetes import client

    claim = client.V1PersistentVolumeClaimVolumeSource(claim_name=STORE_CLAIM)
    return client.V1Volume(name="store", persistent_volume_claim=claim)


def _mount_of_store() -> "V1VolumeMount":
    from kubernetes import client

    return client.V1VolumeMount(name="store", mount_path=STORE_FOLDER)


def _user() -> "V1PodSecurityContext":
    """Returns the image's user, 1000; its files in the volume belong to that group."""
    from kubernetes import client

    return client.V1PodSecurityContext(run_as_non_root=True, run_as_user=1000, fs_group=1000)
