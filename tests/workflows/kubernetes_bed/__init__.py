"""Kubernetes and KubeRay's operator themselves, over pods of the cluster bed on this machine.

| part | what it is here |
|---|---|
| `ControlPlane` | etcd, kube-apiserver with RBAC, kube-controller-manager and kube-scheduler |
| `KubeRay` | the operator, in a pod with the rights of its chart, and its CRDs |
| `Kubelet` | this project's own: runs each pod that is bound to it as a `Pod` of the cluster bed |
| `NameServer` | names of services, by their endpoints |
| `KubernetesBed` | all of it, with a namespace as `deployment/production/cluster.yaml` makes it |

The programs are no part of this project: `binaries.py` says which are needed, and where from. What
it does not show: images, limits of memory and CPU, network policies, several machines, and GPUs.
"""

from tests.workflows.kubernetes_bed.api import Api, ApiError
from tests.workflows.kubernetes_bed.bed import FLYTE, NAMESPACE, KubernetesBed
from tests.workflows.kubernetes_bed.binaries import why_no_kubernetes

__all__ = ["FLYTE", "NAMESPACE", "Api", "ApiError", "KubernetesBed", "why_no_kubernetes"]
