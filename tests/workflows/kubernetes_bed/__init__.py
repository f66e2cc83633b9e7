"""Real Kubernetes and KubeRay's operator, with pods of the cluster bed on this machine.

| part | implementation |
|---|---|
| `ControlPlane` | etcd, kube-apiserver with RBAC, kube-controller-manager and kube-scheduler |
| `KubeRay` | the operator, in a pod with the rights of its chart, and its CRDs |
| `Kubelet` | custom: runs each pod that is bound to it as a `Pod` of the cluster bed |
| `NameServer` | resolves names of services to their endpoints |
| `KubernetesBed` | all of these, with the namespace of `deployment/production/cluster.yaml` |

The programs are not part of this project: `binaries.py` lists them and where to get them. Not
covered: images, limits of memory and CPU, network policies, several machines, and GPUs.
"""

from tests.workflows.kubernetes_bed.api import Api, ApiError
from tests.workflows.kubernetes_bed.bed import FLYTE, NAMESPACE, KubernetesBed
from tests.workflows.kubernetes_bed.binaries import why_no_kubernetes

__all__ = ["FLYTE", "NAMESPACE", "Api", "ApiError", "KubernetesBed", "why_no_kubernetes"]
