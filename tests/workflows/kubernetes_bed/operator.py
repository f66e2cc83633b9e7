"""KubeRay's operator in a pod of the bed, with its CRDs, account and the rights of its chart."""

from pathlib import Path
from types import TracebackType

from tests.workflows.cluster_bed import Network, Pod
from tests.workflows.kubernetes_bed.api import objects_of
from tests.workflows.kubernetes_bed.binaries import binary
from tests.workflows.kubernetes_bed.control_plane import ControlPlane

NAMESPACE = ACCOUNT = "kuberay-operator"
_OPTIONS = (  # as the chart 1.5.1 sets them with deployment/production/values-kuberay.yaml
    "--feature-gates=RayClusterStatusConditions=true,RayJobDeletionPolicy=false,"
    "RayMultiHostIndexing=false,RayServiceIncrementalUpgrade=false",
    "--log-stdout-encoder=json",
    "--enable-leader-election=true",
    "--enable-metrics=true",
    "--reconcile-concurrency=1",
    "--qps=100",
    "--burst=200",
)


class KubeRay:
    """The operator; a context manager.

    Args:
        plane: Control plane of the cluster.
        network: Network that the operator's pod joins.
        nameserver: Address of the name server that resolves the heads' dashboards.
        folder: Folder on this machine for the operator's account and log.
    """

    def __init__(
        self, plane: ControlPlane, network: Network, nameserver: str, folder: Path
    ) -> None:
        self._plane, self._network = plane, network
        self._nameserver, self._folder = nameserver, folder
        self.log = folder / "operator.log"

    def __enter__(self) -> "KubeRay":
        for path in sorted(binary("kuberay/crd").glob("*.yaml")):
            for definition in objects_of(path):
                self._plane.admin.create(definition)
        self._plane.wait(self._knows_ray_jobs, "KubeRay's CRDs")
        self._give_rights()
        account = self._plane.account(NAMESPACE, ACCOUNT, self._folder / "account")
        program = binary("kuberay-operator").resolve()
        self._pod = Pod(
            self._network,
            "kuberay-operator",
            [str(program), *_OPTIONS],
            {
                "KUBERNETES_SERVICE_HOST": self._plane.host,
                "KUBERNETES_SERVICE_PORT": str(self._plane.port),
                # Older servers do not support what a client of Kubernetes 1.34 would request here.
                "KUBE_FEATURE_WatchListClient": "false",
            },
            log=self.log,
            account=account,
            sees=[program.parent],
            nameserver=self._nameserver,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pod.remove()

    def _knows_ray_jobs(self) -> bool:
        return self._plane.admin.find("/apis/ray.io/v1/rayjobs") is not None

    def _give_rights(self) -> None:
        admin, name = self._plane.admin, {"name": ACCOUNT}
        admin.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name}
        admin.create(account, NAMESPACE)
        for file, binding in (
            ("role.yaml", "ClusterRoleBinding"),
            ("leader_election_role.yaml", "RoleBinding"),
        ):
            (role,) = objects_of(binary("kuberay/rbac") / file)
            role["metadata"] = name
            group = "rbac.authorization.k8s.io"
            admin.create(role, NAMESPACE)
            admin.create(
                {
                    "apiVersion": f"{group}/v1",
                    "kind": binding,
                    "metadata": name,
                    "roleRef": {"apiGroup": group, "kind": role["kind"], **name},
                    "subjects": [{"kind": "ServiceAccount", "namespace": NAMESPACE, **name}],
                },
                NAMESPACE,
            )
