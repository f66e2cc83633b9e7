"""Programs of Kubernetes and KubeRay, which this project does not ship.

They are expected in the folder that `NEMO_RL_KUBERNETES` names:

| file | source |
|---|---|
| `etcd` | a release of etcd 3.4 or later |
| `kube-apiserver`, `kube-controller-manager`, `kube-scheduler` | a release of Kubernetes |
| `kuberay-operator` | `/manager` in the image of KubeRay's operator 1.5.1 |
| `kuberay/crd/`, `kuberay/rbac/` | `crd/bases/` and `rbac/` of `ray-operator/config/` there |
| `kueue/crd/` (optional) | `config/components/crd/bases/` of Kueue 0.19.2 |
"""

import os
from functools import cache
from pathlib import Path

from tests.workflows.cluster_bed import why_no_pods

VARIABLE = "NEMO_RL_KUBERNETES"
_NEEDED = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kuberay-operator",
    "kuberay/crd",
    "kuberay/rbac/role.yaml",
)


def binary(name: str) -> Path:
    """Returns the path of a program or another file in the folder."""
    return Path(os.environ[VARIABLE]).resolve() / name


@cache
def why_no_kubernetes() -> str | None:
    """Returns why Kubernetes cannot be started here, or None if it can."""
    if not os.environ.get(VARIABLE):
        return f"{VARIABLE} does not name a folder with the programs of Kubernetes and KubeRay"
    lacking = [name for name in _NEEDED if not binary(name).exists()]
    if lacking:
        return f"the folder of {VARIABLE} lacks {', '.join(lacking)}"
    return why_no_pods()
