"""The values of the charts hold no key that the chart, Flyte or KubeRay does not know.

Helm takes any key, and Flyte ignores those of a section that it does not know. The tables list what
the charts and the Go structs of Flyte 1.16 and KubeRay know of the sections that are used here; the
charts themselves cannot be fetched where these tests run.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.tasks.test_deployment import documents

ANY = None
"""Whatever is below is the user's, or Kubernetes'."""

_QUANTITIES = dict.fromkeys(["cpu", "memory", "gpu", "storage_request", "ephemeralStorage"], ANY)
_K8S = dict.fromkeys(
    [
        "inject-finalizer", "default-annotations", "default-labels", "default-env-vars",
        "default-env-vars-from-env", "default-env-from-configmaps", "default-env-from-secrets",
        "default-cpus", "default-memory", "default-tolerations", "default-node-selector",
        "default-affinity", "scheduler-name", "interruptible-tolerations",
        "interruptible-node-selector", "interruptible-node-selector-requirement",
        "non-interruptible-node-selector-requirement", "resource-tolerations", "co-pilot",
        "delete-resource-on-finalize", "create-container-error-grace-period",
        "image-pull-backoff-grace-period", "gpu-device-node-label",
        "gpu-partition-size-node-label", "gpu-unpartitioned-node-selector-requirement",
        "gpu-unpartitioned-toleration", "gpu-resource-name", "default-pod-security-context",
        "default-security-context", "enable-host-networking-pod", "default-pod-dns-config",
        "default-pod-template-name", "default-pod-template-resync", "send-object-events",
    ],
    ANY,
)  # fmt: skip
_RAY = dict.fromkeys(
    [
        "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "serviceType", "includeDashboard",
        "dashboardHost", "nodeIPAddress", "remoteClusterConfig", "logs", "logsSidecar",
        "dashboardURLTemplate", "defaults", "enableUsageStats", "serviceAccount",
    ],
    ANY,
)  # fmt: skip
_NOTIFICATIONS = dict.fromkeys(
    [
        "type", "region", "aws", "gcp", "publisher", "processor", "emailer", "reconnectAttempts",
        "reconnectDelaySeconds",
    ],
    ANY,
)  # fmt: skip
INLINE: dict[str, Any] = {
    "storage": {"cache": {"max_size_mbs": ANY, "target_gc_percent": ANY}},
    "notifications": _NOTIFICATIONS,
    "scheduler": {
        "workflowExecutor": {
            "scheme": ANY,
            "local": {"adminRateLimit": {"tps": ANY, "burst": ANY}, "useUTCTz": ANY},
        }
    },
    "propeller": {
        "workers": ANY,
        "max-workflow-retries": ANY,
        "node-config": {
            "ignore-retry-cause": ANY,
            "default-max-attempts": ANY,
            "interruptible-failure-threshold": ANY,
            "default-deadlines": ANY,
            "max-node-retries-system-failures": ANY,
        },
    },
    "tasks": {"task-plugins": {"enabled-plugins": ANY, "default-for-task-types": ANY}},
    "task_resources": {"defaults": _QUANTITIES, "limits": _QUANTITIES},
    "plugins": {"k8s": _K8S, "ray": _RAY},
}
CHART: dict[str, Any] = {
    "configuration": {
        "database": dict.fromkeys(
            ["username", "password", "passwordPath", "host", "port", "dbname", "options"], ANY
        ),
        "storage": {
            "metadataContainer": ANY,
            "userDataContainer": ANY,
            "provider": ANY,
            "providerConfig": {
                "s3": dict.fromkeys(
                    [
                        "region", "disableSSL", "v2Signing", "endpoint", "authType", "accessKey",
                        "secretKey",
                    ],
                    ANY,
                ),
                "gcs": {"project": ANY},
            },
        },
        "logging": ANY,
        "auth": ANY,
        "inline": INLINE,
    },
    "clusterResourceTemplates": {"inline": ANY, "externalConfigMap": ANY, "inlineConfigMap": ANY},
    "deployment": dict.fromkeys(
        ["image", "extraEnvVars", "resources", "extraVolumes", "extraVolumeMounts", "podLabels"],
        ANY,
    ),
    "service": ANY,
    "ingress": ANY,
    "rbac": dict.fromkeys(["create", "labels", "annotations", "extraRules"], ANY),
    "serviceAccount": dict.fromkeys(
        ["create", "name", "labels", "annotations", "imagePullSecrets"], ANY
    ),
}  # fmt: skip
PROPELLER_NEEDS = {
    "rayjobs": {"create", "get", "list", "watch", "update", "patch", "delete"},
    "rayclusters": {"get", "list", "watch"},
}
"""What Flyte's Ray plugin does: its informer lists and watches, and its finalizer updates."""


def unknown_keys(values: Any, known: Any, path: str = "") -> Iterator[str]:
    """The paths of keys that the table does not have."""
    if known is ANY or not isinstance(values, dict):
        return
    for key, value in values.items():
        where = f"{path}.{key}" if path else key
        if key not in known:
            yield where
        else:
            yield from unknown_keys(value, known[key], where)


@pytest.mark.parametrize("name", ["production/values-s3.yaml", "production/values-gcs.yaml"])
def test_flyte_knows_every_key(name: str) -> None:
    (values,) = documents(name)
    assert list(unknown_keys(values, CHART)) == []


def test_a_key_that_is_not_known_is_found() -> None:
    (values,) = documents("production/values-s3.yaml")
    inline = values["configuration"]["inline"]
    inline["task_resources"]["defaults"]["storage"] = "1Gi"  # a key of earlier versions
    inline["plugins"]["ray"]["ttlSecondAfterFinished"] = 10
    values["rbac"]["extraRule"] = []
    assert list(unknown_keys(values, CHART)) == [
        "configuration.inline.task_resources.defaults.storage",
        "configuration.inline.plugins.ray.ttlSecondAfterFinished",
        "rbac.extraRule",
    ]


def test_schedules_are_in_utc() -> None:
    """`nemo-rl schedule` prints its times so; Flyte's default is the zone of the scheduler."""
    (values,) = documents("production/values-s3.yaml")
    scheduler = values["configuration"]["inline"]["scheduler"]["workflowExecutor"]
    assert scheduler["local"]["useUTCTz"] is True


def test_propeller_may_do_what_its_ray_plugin_does() -> None:
    (values,) = documents("production/values-s3.yaml")
    allowed: dict[str, set[str]] = {}
    for rule in values["rbac"]["extraRules"]:
        if "ray.io" in rule["apiGroups"]:
            for resource in rule["resources"]:
                allowed.setdefault(resource, set()).update(rule["verbs"])
    for resource, verbs in PROPELLER_NEEDS.items():
        assert verbs <= allowed.get(resource, set()), resource


def test_the_secret_that_is_mounted_is_the_one_that_is_read() -> None:
    (values,) = documents("production/values-s3.yaml")
    deployment = values["deployment"]
    volumes = {each["name"] for each in deployment["extraVolumes"]}
    mounts = {each["mountPath"]: each["name"] for each in deployment["extraVolumeMounts"]}
    folder = values["configuration"]["database"]["passwordPath"].rpartition("/")[0]
    assert mounts[folder] in volumes


def test_what_pyflyte_is_told_to_ask_for_is_there() -> None:
    """`authType: Pkce` needs a login, and an address with TLS that gRPC gets through."""
    (values,) = documents("production/values-s3.yaml")
    (client,) = documents("production/flyte.yaml")
    host = client["admin"]["endpoint"].removeprefix("dns:///")
    ingress, auth = values["ingress"], values["configuration"]["auth"]
    assert ingress["create"]
    assert ingress["host"] == host
    assert ingress["tls"][0]["hosts"] == [host]
    assert ingress["grpcAnnotations"]["nginx.ingress.kubernetes.io/backend-protocol"] == "GRPC"
    assert client["admin"]["authType"] == "Pkce"
    assert auth["enabled"]
    assert auth["authorizedUris"] == [f"https://{host}"]


KUBERAY_OPERATOR: dict[str, Any] = {
    **dict.fromkeys(
        [
            "replicas", "image", "imagePullSecrets", "nodeSelector", "labels", "annotations",
            "affinity", "tolerations", "serviceAccount", "logging", "featureGates", "metrics",
            "leaderElectionEnabled", "reconcileConcurrency", "rbacEnable",
            "crNamespacedRbacEnable", "singleNamespaceInstall", "watchNamespace", "env",
            "livenessProbe", "readinessProbe", "securityContext", "service",
        ],
        ANY,
    ),
    "batchScheduler": {"enabled": ANY, "name": ANY},
    "resources": {"limits": ANY, "requests": ANY},
}  # fmt: skip
_GROUP: dict[str, Any] = {"rayStartParams": ANY, "template": ANY, "resources": ANY, "labels": ANY}
RAY_CLUSTER: dict[str, Any] = {
    "apiVersion": ANY,
    "kind": ANY,
    "metadata": ANY,
    "spec": {
        **dict.fromkeys(
            [
                "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions",
                "headServiceAnnotations", "suspend", "managedBy", "gcsFaultToleranceOptions",
            ],
            ANY,
        ),
        "headGroupSpec": {**_GROUP, "serviceType": ANY, "headService": ANY, "enableIngress": ANY},
        "workerGroupSpecs": ANY,
    },
}  # fmt: skip
WORKER_GROUP = _GROUP | dict.fromkeys(
    [
        "groupName", "replicas", "minReplicas", "maxReplicas", "idleTimeoutSeconds", "numOfHosts",
        "scaleStrategy", "suspend",
    ],
    ANY,
)  # fmt: skip


def test_kuberays_operator_knows_every_key() -> None:
    (values,) = documents("production/values-kuberay.yaml")
    assert list(unknown_keys(values, KUBERAY_OPERATOR)) == []


@pytest.mark.parametrize("name", ["laptop", "one_gpu", "node_8gpu", "cluster_8"])
def test_kuberay_knows_every_key_of_a_ray_cluster(name: str) -> None:
    """Pods within it are checked by the models of the Kubernetes client."""
    (cluster,) = documents(f"ray/{name}.yaml")
    assert cluster["apiVersion"] == "ray.io/v1"
    assert list(unknown_keys(cluster, RAY_CLUSTER)) == []
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert list(unknown_keys(group, WORKER_GROUP)) == []
        assert {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"} <= {*group}
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        texts = group["rayStartParams"].values()
        assert all(isinstance(text, str) for text in texts), "KubeRay refuses numbers"


def test_a_sandbox_has_what_flyte_knows() -> None:
    (values,) = documents("sandbox/plugins.yaml")
    assert list(unknown_keys(values, INLINE)) == []
