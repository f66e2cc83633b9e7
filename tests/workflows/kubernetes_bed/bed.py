"""Kubernetes with one machine, KubeRay's operator, and a namespace set up as in production."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.unit.tasks.test_deployment import VALUES, documents
from tests.workflows.cluster_bed import Network
from tests.workflows.kubernetes_bed.api import Api
from tests.workflows.kubernetes_bed.control_plane import ControlPlane
from tests.workflows.kubernetes_bed.kubelet import Kubelet
from tests.workflows.kubernetes_bed.names import NameServer
from tests.workflows.kubernetes_bed.operator import KubeRay

NAMESPACE = VALUES["NAMESPACE"]
FLYTE = "flyte", "flyte-binary"
"""Namespace and name of the account that Flyte's components use."""
RBAC = "rbac.authorization.k8s.io"
_VOLUME: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "PersistentVolume",
    "metadata": {"name": "store"},
    "spec": {
        "capacity": {"storage": "10Ti"},
        "accessModes": ["ReadWriteMany"],
        "storageClassName": VALUES["SHARED_STORAGE_CLASS"],
        "hostPath": {"path": "/path/of/the/bed"},
    },
}


class KubernetesBed:
    """The cluster; a context manager.

    Args:
        folder: Folder on this machine for all files of the cluster.

    Attributes:
        network: Network of all pods.
        volume: Folder that the stages' volume claim is bound to.
        plane: Processes of Kubernetes.
        kubelet: The only machine.
        operator: KubeRay's operator.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.volume = folder / "volume"
        self._started = ExitStack()
        self.network = Network()
        self.plane: ControlPlane
        self.kubelet: Kubelet
        self.operator: KubeRay

    def __enter__(self) -> "KubernetesBed":
        with ExitStack() as started:
            enter = started.enter_context
            enter(self.network)
            self.volume.mkdir(parents=True)
            os.chown(self.volume, 1000, 1000)
            address = self.network.address
            self.plane = enter(ControlPlane(self._folder / "plane", self.network))
            enter(NameServer(address, self.admin))
            folder = self._folder / "machine"
            self.kubelet = enter(Kubelet(self.plane, self.network, address, folder, self.volume))
            folder = self._folder / "operator"
            self.operator = enter(KubeRay(self.plane, self.network, address, folder))
            self._make_namespace()
            self._make_flyte_account()
            self._started = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    @property
    def admin(self) -> Api:
        """The API with administrator rights."""
        return self.plane.admin

    def _make_namespace(self) -> None:
        self.admin.create(_VOLUME)
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        self.admin.create(made)
        for each in documents("production/cluster.yaml"):
            self.admin.apply(each, NAMESPACE)

    def _make_flyte_account(self) -> None:
        """Creates it with the rights that production's values add to those of Flyte's chart."""
        namespace, name = FLYTE
        (values,) = documents("production/values-s3.yaml")
        self.admin.create(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        )
        account = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
        self.admin.create(
            {"apiVersion": "v1", "kind": account["kind"], "metadata": {"name": name}}, namespace
        )
        role = {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": name}}
        self.admin.create({**role, "rules": values["rbac"]["extraRules"]})
        self.admin.create(
            {
                **role,
                "kind": "ClusterRoleBinding",
                "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": name},
                "subjects": [account],
            }
        )

    def pods(self, job: str, kind: str = "") -> list[dict[str, Any]]:
        """Returns the pods of a RayJob.

        Args:
            job: Name of the RayJob.
            kind: `head` or `worker`; by default all pods, with the submitter's, which has no kind.
        """
        chosen = {"labelSelector": f"ray.io/node-type={kind}"} if kind else {}
        pods = self.admin.items(f"/api/v1/namespaces/{NAMESPACE}/pods", **chosen)
        return [each for each in pods if each["metadata"]["name"].startswith(f"{job}-")]

    def logs(self, job: str) -> dict[str, str]:
        """Returns the logs of the pods of a RayJob, by pod name."""
        paths = (self._folder / "machine").glob(f"{job}-*.log")
        return {path.stem: path.read_text(errors="replace") for path in paths}
