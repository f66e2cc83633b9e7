"""The part of Kubernetes' API that stages use: their own pod, RayJobs of one namespace, and nodes.

The server checks the token of the service account and the rights of the roles in
`deployment/production/cluster.yaml`. A new RayJob gets its pods immediately and, as with KubeRay,
loses them when its entry point ends or when it is deleted.
"""

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.commands import REPOSITORY
from tests.workflows.cluster_bed.kuberay import GCS_PORT, RayJob

NAMESPACE = "flow-development"
_TOKEN = "token-of-the-default-account"
_VERBS = {"POST": "create", "DELETE": "delete"}
_DASHBOARD_PORT = 8265
_ENDED = ("Complete", "Failed", "Deleted")
Maker = Callable[[Mapping[str, Any], Path, Mapping[str, str]], RayJob]


@dataclass
class MadeRayJob:
    """A RayJob that a stage has created.

    Attributes:
        body: The object as the stage sent it.
        job: Its pods, once they run.
        how: KubeRay's `jobDeploymentStatus`; `Deleted` if it was removed before its end.
        made_at, running_at, removed_at: Times of these events, in seconds of `time.monotonic`.
    """

    body: dict[str, Any]
    job: RayJob | None = None
    how: str = "Initializing"
    made_at: float = field(default_factory=time.monotonic)
    running_at: float | None = None
    removed_at: float | None = None

    @property
    def name(self) -> str:
        """Name of the object."""
        return str(self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Id of the object; a later object of the same name has another one."""
        return f"{self.name}-{self.made_at}"

    @property
    def head_pod(self) -> str:
        """Name of its head pod."""
        return f"{self.name}-head"

    @property
    def has_head(self) -> bool:
        """Whether its head pod runs."""
        return self.job is not None and self.job.head.poll() is None

    def as_object(self) -> dict[str, Any]:
        """Returns the object with its status, as Kubernetes serves it."""
        status: dict[str, Any] = {"jobDeploymentStatus": self.how}
        if self.how == "Running" and self.job is not None:
            # The operator keeps both after the head is lost (`test_kuberay.py`).
            status["dashboardURL"] = f"{self.job.head.address}:{_DASHBOARD_PORT}"
            status["rayClusterStatus"] = {"head": {"podName": self.head_pod}}
        metadata = {**self.body["metadata"], "uid": self.uid}
        return {**self.body, "metadata": metadata, "status": status}


class KubernetesServer:
    """The API; a context manager.

    Args:
        folder: Folder on this machine for the account, the certificate and logs.
        address: Address to listen on: the one of this machine in the pods' network.
        make: Function that starts the pods of a RayJob.

    Attributes:
        account: Folder with the files of the service account that are mounted into a pod.
        ray_jobs: Every RayJob that was created, in order.
        refused: Requests that the role does not allow.
        rules: Allowed requests: group, resource and verb.
        nodes: The machines of the cluster, as Kubernetes objects.
    """

    def __init__(self, folder: Path, address: str, make: Maker) -> None:
        self._folder, self._address, self._make = folder, address, make
        self.account = folder / "account"
        self.ray_jobs: list[MadeRayJob] = []
        self.refused: list[str] = []
        self._pods: dict[str, dict[str, Any]] = {}
        self.rules = _rules()
        self.nodes: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        # Pods end with the thread that started them.
        self._operator = ThreadPoolExecutor(1)
        self._watching: list[Future[None]] = []
        self._ended = threading.Event()

    def __enter__(self) -> "KubernetesServer":
        self.account.mkdir(parents=True)
        key, certificate = self._folder / "key.pem", self.account / "ca.crt"
        make_certificate(key, certificate, self._address)
        (self.account / "token").write_text(_TOKEN)
        (self.account / "namespace").write_text(NAMESPACE)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                status, answer = server.answer(
                    self.command, self.path, body, self.headers.get("Authorization", "")
                )
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = _answer  # noqa: N815  # names of http.server

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer((self._address, 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()
        for made in self.ray_jobs:
            self._operator.submit(self._take_down, made, "Deleted")
        self._operator.shutdown()

    def admit(
        self, name: str, spec: Mapping[str, Any], environment: Mapping[str, str]
    ) -> dict[str, str]:
        """Registers a plain pod before it starts.

        Returns:
            Variables that Kubernetes adds to its environment.
        """
        name = f"{name}-{len(self._pods)}"
        host, port = self._http.server_address[:2]
        main = (spec.get("containers") or [{}])[0]
        self._pods[name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "ownerReferences": [
                    {
                        "apiVersion": "flyte.lyft.com/v1alpha1",
                        "kind": "flyteworkflow",
                        "name": environment["FLYTE_INTERNAL_EXECUTION_ID"],
                        "uid": "0",
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": {
                **spec,
                "serviceAccountName": "default",
                "containers": [
                    {
                        **main,
                        "name": main.get("name", "main"),
                        "image": main.get("image", "unused"),
                        "env": [{"name": k, "value": v} for k, v in environment.items()],
                    }
                ],
            },
        }
        fields = {
            each["name"]: name
            for each in main.get("env", [])
            if each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") == "metadata.name"
        }
        return {
            **fields,
            "KUBERNETES_SERVICE_HOST": str(host),
            "KUBERNETES_SERVICE_PORT": str(port),
        }

    def answer(
        self, method: str, address: str, body: dict[str, Any], authorization: str
    ) -> tuple[int, dict[str, Any]]:
        """Returns the status and the object for a request."""
        if authorization.lower() != f"bearer {_TOKEN}":
            return 401, {"message": "Unauthorized"}
        parts = urlsplit(address)
        if parts.path.endswith("/selfsubjectaccessreviews"):  # every account may query its rights
            return 201, self._review(body)
        path = parts.path.strip("/").split("/")
        group = "" if path[0] == "api" else path[1]
        inside = path[path.index(NAMESPACE) + 1 :] if NAMESPACE in path else path[2:]
        resource, name = inside[0], inside[1] if len(inside) > 1 else ""
        verb = _VERBS.get(method) or ("get" if name else "list")
        if (group, resource, verb) not in self.rules:
            self.refused.append(f"{verb} {resource}")
            return 403, {"message": f"default cannot {verb} resource {resource} in {group!r}"}
        if resource == "nodes":
            return 200, {"apiVersion": "v1", "kind": "NodeList", "items": self.nodes}
        if resource == "pods":
            pod = self._pods.get(name) or self._head(name)
            return (200, pod) if pod else (404, {"message": f"no pod {name}"})
        with self._lock:
            return self._ray_job(verb, name, body, parse_qs(parts.query))

    def _head(self, name: str) -> dict[str, Any] | None:
        if not any(each.head_pod == name and each.has_head for each in self.ray_jobs):
            return None
        running = {"phase": "Running"}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "status": running}

    def _review(self, body: dict[str, Any]) -> dict[str, Any]:
        request = body["spec"]["resourceAttributes"]
        right = request.get("group", ""), request["resource"], request["verb"]
        allowed = request.get("namespace") == NAMESPACE and right in self.rules
        return {**body, "status": {"allowed": allowed}}

    def _ray_job(
        self, verb: str, name: str, body: dict[str, Any], query: Mapping[str, list[str]]
    ) -> tuple[int, dict[str, Any]]:
        existing = {made.name: made for made in self.ray_jobs if made.removed_at is None}
        if verb == "list":
            label, _, value = query["labelSelector"][0].partition("=")
            chosen = [
                m for m in existing.values() if m.body["metadata"]["labels"].get(label) == value
            ]
            return 200, {"items": [made.as_object() for made in chosen]}
        if verb == "create":
            if body["metadata"]["name"] in existing:
                return 409, {"message": "already exists"}
            made = MadeRayJob(body)
            self.ray_jobs.append(made)
            self._operator.submit(self._bring_up, made)
            return 201, made.as_object()
        if name not in existing:
            return 404, {"message": "not found"}
        uid = (body or {}).get("preconditions", {}).get("uid")
        if verb == "delete" and uid not in (None, existing[name].uid):
            return 409, {"message": "the UID in the precondition is another"}
        if verb == "delete":
            existing[name].removed_at = time.monotonic()
            self._operator.submit(self._take_down, existing[name], "Deleted")
        return 200, existing[name].as_object()

    def _bring_up(self, made: MadeRayJob) -> None:
        folder = self._folder / f"{made.name}-{len(self.ray_jobs)}"
        folder.mkdir()
        head = made.body["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
        variables = {each["name"]: each["value"] for each in head["containers"][0]["env"]}
        try:
            made.job = self._make(made.body["spec"], folder, variables)
        except TimeoutError as error:
            made.how = "Failed"
            (folder / "error").write_text(str(error))
            return
        made.how, made.running_at = "Running", time.monotonic()
        threading.Thread(target=self._watch, args=(made,), daemon=True).start()

    def _watch(self, made: MadeRayJob) -> None:
        assert made.job is not None
        while made.job.poll() is None and not self._ended.is_set():
            time.sleep(0.2)
        time.sleep(2)  # a pod's processes do not all end at the same time
        # KubeRay does not replace a lost head and leaves the RayJob as it is.
        if not self._ended.is_set() and made.has_head:
            how = "Failed" if made.job.poll() else "Complete"
            self._operator.submit(self._take_down, made, how)

    def _take_down(self, made: MadeRayJob, how: str) -> None:
        if made.how not in _ENDED:
            made.how = how
        if made.job is not None:
            made.job.remove()


def _rules() -> set[tuple[str, str, str]]:
    text = (REPOSITORY / "deployment/production/cluster.yaml").read_text()
    kinds = "Role", "ClusterRole"
    roles = [each for each in yaml.safe_load_all(text) if each and each["kind"] in kinds]
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def make_certificate(key: Path, certificate: Path, address: str) -> None:
    """Writes a key and a self-signed certificate for a server at this address."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=kubernetes"),
            *("-addext", f"subjectAltName=IP:{address}"),
        ],
        check=True,
        capture_output=True,
    )


__all__ = ["GCS_PORT", "KubernetesServer", "MadeRayJob"]
