"""A cluster on this machine whose pods share nothing: no disk, no memory, no loopback address.

| part | represents | implementation |
|---|---|---|
| `Network` | the cluster's network | a bridge that connects the pods and the S3 server |
| `Pod` | a pod | namespaces of mounts, network, processes, IPC and host name; user 1000 |
| `RayJob` | KubeRay's RayJob | a head pod, which runs the task's command, and worker pods |
| `ClusterBed` | Flyte's propeller | starts each container in a pod or as a RayJob |

In a pod, /tmp, /var, /home, /root, /run, /dev/shm and the folder of this checkout are private and
empty, and the rest is read-only. The image is only the environment of packages in this checkout.
Only the pods of a RayJob mount the shared volume; everything else comes from S3.

Not covered: Kubernetes itself (scheduling, RBAC, limits), KubeRay's operator and its
submitter (the command is started in the head pod directly), and GPUs.
"""

from tests.workflows.cluster_bed.bed import ClusterBed
from tests.workflows.cluster_bed.kuberay import RayJob
from tests.workflows.cluster_bed.network import Network, why_no_pods
from tests.workflows.cluster_bed.pod import Pod

__all__ = ["ClusterBed", "Network", "Pod", "RayJob", "why_no_pods"]
