"""A cluster on this machine whose pods share nothing: no disk, no memory, no loopback address.

| part | stands for | what it is here |
|---|---|---|
| `Network` | the cluster's network | a bridge; pods reach one another and the S3 server by it |
| `Pod` | a pod | name spaces of mounts, network, processes, IPC and host name; user 1000 |
| `RayJob` | KubeRay's RayJob | a head's pod, in which the task's command runs, and the workers' |
| `ClusterBed` | Flyte's propeller | what starts each container in a pod or as a RayJob |

Within a pod, /tmp, /var, /home, /root, /run, /dev/shm and the folder of this checkout are its own
and empty, the rest is read-only, and of this checkout there is only the environment of packages:
the image. Only the pods of a RayJob have the shared volume, and all else comes from S3.

What it does not show: Kubernetes itself (scheduling, RBAC, limits), KubeRay's operator and its
submitter (the command is started in the head's pod directly), and GPUs.
"""

from tests.workflows.cluster_bed.bed import ClusterBed
from tests.workflows.cluster_bed.kuberay import RayJob
from tests.workflows.cluster_bed.network import Network, why_no_pods
from tests.workflows.cluster_bed.pod import Pod

__all__ = ["ClusterBed", "Network", "Pod", "RayJob", "why_no_pods"]
