"""Processes of Kubernetes: etcd, the API server, the controllers and the scheduler."""

import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from urllib3.exceptions import HTTPError

from tests.workflows.cluster_bed import Network
from tests.workflows.cluster_bed.kubernetes_server import make_certificate
from tests.workflows.kubernetes_bed.api import Api, ApiError
from tests.workflows.kubernetes_bed.binaries import binary

_START_SECONDS = 120.0
_ADMIN = "admin"
_NO_SERVER = ("--leader-elect=false", "--secure-port=0")
_ENDS_WITH_THIS = ("setpriv", "--pdeathsig", "KILL")


class ControlPlane:
    """The processes; a context manager.

    The API server requires a token and enforces RBAC. The node controllers are left out because the
    node here has no heartbeat.

    Args:
        folder: Folder on this machine for certificates, data and logs.
        network: Network in which the API server listens on this machine's address.

    Attributes:
        admin: The API with administrator rights.
        authority: File with the server's certificate.
        kubeconfig: File with which `kubectl` has administrator rights.
        host, port: Address of the API server.
    """

    def __init__(self, folder: Path, network: Network) -> None:
        self._folder, self._network, self.host = folder, network, network.address
        self.port = _free_port(self.host)
        self._etcd_port, self._peer_port = (_free_port("127.0.0.1") for _ in range(2))
        self.authority, self.kubeconfig = folder / "ca.crt", folder / "kubeconfig"
        self._token = secrets.token_hex(16)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._processes = ExitStack()
        self.admin: Api

    @property
    def url(self) -> str:
        """URL of the API server."""
        return f"https://{self.host}:{self.port}"

    def __enter__(self) -> "ControlPlane":
        self._folder.mkdir(parents=True)
        with ExitStack() as started:
            started.callback(self.__exit__)
            self._start_etcd()
            self._start_api_server()
            self._write_kubeconfig()
            self._start_apart("kube-controller-manager", *self._controller_options())
            self._start_apart("kube-scheduler", f"--kubeconfig={self.kubeconfig}", *_NO_SERVER)
            self.wait(self._has_default_account, "the controllers")
            started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def account(self, namespace: str, name: str, folder: Path) -> Path:
        """Writes the files of a service account that are mounted into a pod.

        Returns:
            The folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "token").write_text(self.token_of(namespace, name))
        (folder / "namespace").write_text(namespace)
        shutil.copy(self.authority, folder / "ca.crt")
        return folder

    def token_of(self, namespace: str, name: str) -> str:
        """Requests a token of a service account, as a kubelet does."""
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        body["spec"] = {"audiences": None, "expirationSeconds": 36000}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        token: str = self.admin.request("POST", path, body)["status"]["token"]
        return token

    def as_account(self, namespace: str, name: str) -> Api:
        """Returns a client that uses the token of a service account."""
        return Api(self.url, self.token_of(namespace, name), self.authority)

    def wait(self, is_so: Callable[[], Any], what: str, seconds: float = _START_SECONDS) -> None:
        """Waits until `is_so` returns true.

        Raises:
            TimeoutError: If that takes longer than `seconds`, or if a process ended.
        """
        deadline = time.monotonic() + seconds
        while not is_so():
            ended = [name for name, process in self._running.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = [self._folder / f"{name}.log" for name in ended]
                tails = "\n".join(log.read_text()[-2000:] for log in logs)
                raise TimeoutError(f"{what} did not come up; ended: {ended}\n{tails}")
            time.sleep(0.2)

    def _has_default_account(self) -> bool:
        return self.admin.find("/api/v1/namespaces/default/serviceaccounts/default") is not None

    def _start(self, name: str, *options: str, within: tuple[str, ...] = ()) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*_ENDS_WITH_THIS, *within, str(binary(name)), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )
        self._running[name] = process
        self._processes.callback(process.wait, 60)
        self._processes.callback(process.kill)

    def _start_apart(self, name: str, *options: str) -> None:
        """Starts a process in a separate network, since its ports are fixed for all clusters."""
        port = self._network.connect()
        self._processes.callback(self._network.disconnect, port)
        self._start(name, *options, within=("nsenter", f"--net=/run/netns/{port.namespace}"))

    def _start_etcd(self) -> None:
        clients, peers = (f"http://127.0.0.1:{p}" for p in (self._etcd_port, self._peer_port))
        self._start(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )

    def _start_api_server(self) -> None:
        key = self._folder / "key.pem"
        make_certificate(key, self.authority, self.host)
        tokens = self._folder / "tokens.csv"
        tokens.write_text(f'{self._token},{_ADMIN},{_ADMIN},"system:masters"\n')
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--bind-address={self.host}",
            f"--advertise-address={self.host}",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self.authority}",
            f"--tls-private-key-file={key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
        )
        self.wait(self._is_ready, "the API server")

    def _is_ready(self) -> bool:
        self.admin = Api(self.url, self._token, self.authority)
        try:
            self.admin.get("/readyz")
        except (ApiError, HTTPError):
            return False
        return True

    def _write_kubeconfig(self) -> None:
        cluster = {"server": self.url, "certificate-authority": str(self.authority)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bed",
            "clusters": [{"name": "bed", "cluster": cluster}],
            "users": [{"name": "bed", "user": {"token": self._token}}],
            "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "bed"}}],
        }
        self.kubeconfig.write_text(yaml.safe_dump(content))

    def _controller_options(self) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig}",
            "--controllers=*,-nodelifecycle,-nodeipam",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self._folder / 'key.pem'}",
            f"--root-ca-file={self.authority}",
            *_NO_SERVER,
        ]


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
    return port
