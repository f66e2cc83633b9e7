"""A machine of the cluster, which runs the pods bound to it, each container in namespaces.

It implements what stages and KubeRay need of a kubelet: init containers, one container with its
environment (also from secrets and fields of the pod), the stage's volume, readiness, `preStop`, the
grace period and exit codes. Left out are images, limits, liveness, restarts and other volumes (a
pod has a private /tmp and /dev/shm anyway). A pod with several containers or restarts fails.
"""

import base64
import itertools
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.pods.pods import STORE_CLAIM
from tests.workflows.cluster_bed import Network, Pod
from tests.workflows.kubernetes_bed.api import MERGE, ApiError
from tests.workflows.kubernetes_bed.control_plane import ControlPlane

MACHINE = "machine-1"
_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 30
_CAPACITY = {
    "cpu": "256",
    "memory": "4Ti",
    "ephemeral-storage": "4Ti",
    "pods": "110",
    "nvidia.com/gpu": "8",
}


class Kubelet:
    """The machine; a context manager.

    Args:
        plane: Control plane of the cluster.
        network: Network of the pods.
        nameserver: Address of the pods' name server.
        folder: Folder on this machine for accounts and logs, `NAME.log` for each pod.
        volume: Folder on this machine that the stages' volume claim is bound to.

    Attributes:
        can_pull: Whether images can be pulled; pods wait while they cannot.
        ended: Time when the last process of each pod ended, in seconds of `time.time`, by pod name.
        exit_codes: Exit codes of the pods that have ended, by pod name.
    """

    def __init__(
        self, plane: ControlPlane, network: Network, nameserver: str, folder: Path, volume: Path
    ) -> None:
        self.plane, self.network, self.nameserver = plane, network, nameserver
        self.folder, self.volume = folder, volume
        self.can_pull = True
        self.ended: dict[str, float] = {}
        self.exit_codes: dict[str, int] = {}
        self._pods: dict[str, _RunningPod] = {}
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "Kubelet":
        self.folder.mkdir(parents=True)
        node = {"apiVersion": "v1", "kind": "Node"}
        self.plane.admin.create({**node, "metadata": {"name": MACHINE}})
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {"capacity": _CAPACITY, "allocatable": _CAPACITY, "conditions": [ready]}
        path = f"/api/v1/nodes/{MACHINE}"
        self.plane.admin.request("PATCH", f"{path}/status", {"status": status}, content_type=MERGE)
        # Normally the node controller removes these once a node is ready.
        self.plane.admin.request("PATCH", path, {"spec": {"taints": None}}, content_type=MERGE)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join(60)

    def processes(self, pod: str) -> Pod:
        """Returns the processes of a running pod.

        Raises:
            KeyError: If the pod does not run.
        """
        for running in self._pods.values():
            if running.name == pod and running.current is not None:
                return running.current
        raise KeyError(pod)

    def _serve(self) -> None:
        # Pods end with the thread that started them, so one thread starts all of them.
        while not self._leaving.wait(_LOOK_SECONDS):
            with suppress(ApiError):
                self._look()
        for running in self._pods.values():
            running.remove()

    def _look(self) -> None:
        manifests = self.plane.admin.items(
            "/api/v1/pods", fieldSelector=f"spec.nodeName={MACHINE}", resourceVersion="0"
        )
        by_uid = {each["metadata"]["uid"]: each for each in manifests}
        for uid, manifest in by_uid.items():
            if uid not in self._pods:
                self._pods[uid] = _RunningPod(self, manifest)
        for uid, running in list(self._pods.items()):
            running.look(by_uid.get(uid))
            if running.is_gone:
                running.remove()
                del self._pods[uid]


class _RunningPod:
    """One pod from its first container to its end."""

    def __init__(self, kubelet: Kubelet, manifest: Mapping[str, Any]) -> None:
        metadata, self._spec = manifest["metadata"], manifest["spec"]
        self.name, self.namespace = metadata["name"], metadata["namespace"]
        self._metadata, self._kubelet = metadata, kubelet
        self._api = kubelet.plane.admin
        self._port = kubelet.network.connect()
        self.current: Pod | None = None
        self.is_gone = False
        self._left = [*self._spec.get("initContainers", []), *self._spec["containers"]]
        self._exit_code: int | None = None
        self._reason = ""
        self._probe = _Readiness(self._spec["containers"][0].get("readinessProbe"))
        self._ending: threading.Thread | None = None
        self._reported: dict[str, Any] | None = None
        self._started_at = _now()
        self._check()

    def look(self, manifest: Mapping[str, Any] | None) -> None:
        """Updates the pod and reports its status.

        Args:
            manifest: The pod in the API; None if it was deleted there.
        """
        if manifest is None:
            self.is_gone = True
            return
        if self._exit_code is None and self._ending is None:
            self._advance()
        if manifest["metadata"].get("deletionTimestamp"):
            self._end(manifest["metadata"].get("deletionGracePeriodSeconds", _GRACE_SECONDS))
        self._report()

    def remove(self) -> None:
        """Ends its processes and disconnects it from the network."""
        if self.current is not None:
            self.current.remove()
        self._kubelet.network.disconnect(self._port)

    @property
    def _is_main(self) -> bool:
        return not self._left and self.current is not None

    @property
    def _is_without_image(self) -> bool:
        return self.current is None and not self._kubelet.can_pull

    def _check(self) -> None:
        if len(self._spec["containers"]) != 1 or self._spec["restartPolicy"] != "Never":
            self._exit_code, self._reason = 128, "this machine runs one container, once"
            self._left = []

    def _advance(self) -> None:
        code = self.current.poll() if self.current is not None else 0
        if code is None:
            if self._is_main:
                assert self.current is not None
                self._probe.look(self.current)
            return
        if self._is_without_image:
            return
        if code or not self._left:
            self._has_ended(code)
            return
        try:
            self._start(self._left[0])
        except LookupError as error:
            self._exit_code, self._reason = 128, str(error)
            return
        del self._left[0]

    def _start(self, container: Mapping[str, Any]) -> None:
        kubelet = self._kubelet
        claims = [each.get("persistentVolumeClaim", {}) for each in self._spec.get("volumes", [])]
        has_store = STORE_CLAIM in [claim.get("claimName") for claim in claims]
        environment = self._environment(container)
        self.current = Pod(
            kubelet.network,
            self.name,
            [*container["command"], *container.get("args", [])],
            environment,
            log=kubelet.folder / f"{self.name}.log",
            volume=kubelet.volume if has_store else None,
            account=self._account(),
            port=self._port,
            nameserver=kubelet.nameserver,
        )

    def _account(self) -> Path:
        name = self._spec.get("serviceAccountName", "default")
        folder = self._kubelet.folder / "accounts" / self.namespace / name
        if not folder.exists():
            self._kubelet.plane.account(self.namespace, name, folder)
        return folder

    def _environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        plane = self._kubelet.plane
        variables = {
            "KUBERNETES_SERVICE_HOST": plane.host,
            "KUBERNETES_SERVICE_PORT": str(plane.port),
        }
        for source in container.get("envFrom", []):
            variables |= self._secret(source["secretRef"])
        for each in container.get("env", []):
            if "valueFrom" in each:
                variables[each["name"]] = self._field(each["valueFrom"]["fieldRef"]["fieldPath"])
            else:
                variables[each["name"]] = each.get("value", "")
        return variables

    def _secret(self, reference: Mapping[str, Any]) -> dict[str, str]:
        path = f"/api/v1/namespaces/{self.namespace}/secrets/{reference['name']}"
        secret = self._api.find(path)
        if secret is None:
            if reference.get("optional"):
                return {}
            raise LookupError(f"no secret {reference['name']}")
        data = secret.get("data") or {}
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def _field(self, path: str) -> str:
        if path.startswith("metadata.labels['"):
            return str(self._metadata["labels"][path.removeprefix("metadata.labels['")[:-2]])
        fields = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "status.podIP": self._port.address,
            "spec.nodeName": MACHINE,
        }
        return fields[path]

    def _end(self, grace_seconds: float) -> None:
        if self._ending is None:
            self._ending = threading.Thread(target=self._stop, args=(grace_seconds,), daemon=True)
            self._ending.start()
        elif not self._ending.is_alive():
            path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
            with suppress(ApiError):
                self._api.request("DELETE", path, {"gracePeriodSeconds": 0})

    def _stop(self, grace_seconds: float) -> None:
        pod = self.current
        if pod is not None and pod.poll() is None:
            lifecycle = self._spec["containers"][0].get("lifecycle", {}) if self._is_main else {}
            hook = lifecycle.get("preStop", {}).get("exec", {}).get("command", [])
            pod.stop(hook, grace_seconds=grace_seconds)
        self._has_ended((pod.poll() if pod is not None else 0) or 0)

    def _has_ended(self, code: int) -> None:
        if self._exit_code is None:
            self._exit_code = code if code >= 0 else 128 - code
            self._kubelet.exit_codes[self.name] = self._exit_code
            self._kubelet.ended[self.name] = time.time()

    def _report(self) -> None:
        status = self._status()
        if status == self._reported:
            return
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}/status"
        self._api.request("PATCH", path, {"status": status}, content_type=MERGE)
        self._reported = status

    def _status(self) -> dict[str, Any]:
        is_running = self._is_main and self._exit_code is None
        is_ready = is_running and self._probe.is_ready and self._ending is None
        phase = "Running" if is_running else "Pending"
        reason = "ErrImagePull" if self._is_without_image else "PodInitializing"
        state: dict[str, Any] = {"waiting": {"reason": reason}}
        if is_running:
            state = {"running": {"startedAt": self._started_at}}
        if self._exit_code is not None:
            phase = "Failed" if self._exit_code else "Succeeded"
            reason = self._reason or ("Error" if self._exit_code else "Completed")
            state = {"terminated": {"exitCode": self._exit_code, "reason": reason}}
        states = {"Initialized": not self._left, "PodScheduled": True}
        states |= {"ContainersReady": is_ready, "Ready": is_ready}
        main = self._spec["containers"][0]
        return {
            "phase": phase,
            "hostIP": self._kubelet.network.address,
            "podIP": self._port.address,
            "podIPs": [{"ip": self._port.address}],
            "startTime": self._started_at,
            "conditions": [{"type": name, "status": str(value)} for name, value in states.items()],
            "containerStatuses": [
                {
                    "name": main["name"],
                    "image": main["image"],
                    "imageID": main["image"],
                    "ready": is_ready,
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }


class _Readiness:
    """A readiness probe that runs a command; without one a container is ready immediately."""

    def __init__(self, probe: Mapping[str, Any] | None) -> None:
        self._settings = probe or {}
        self.is_ready = probe is None
        self._runs: subprocess.Popen[bytes] | None = None
        self._next = 0.0
        self._ends = 0.0
        self._failed = itertools.count(1)

    def look(self, pod: Pod) -> None:
        """Starts or ends an attempt when it is due."""
        now = time.monotonic()
        if not self._settings:
            return
        if not self._next:
            self._next = now + self._settings.get("initialDelaySeconds", 0)
        if self._runs is None:
            if now >= self._next:
                command = self._settings["exec"]["command"]
                silent = ["sh", "-c", 'exec "$@" > /dev/null 2>&1', "probe", *command]
                self._runs = pod.run(silent, {})
                self._next = now + self._settings.get("periodSeconds", 10)
                self._ends = now + self._settings.get("timeoutSeconds", 1)
            return
        code = self._runs.poll()
        if code is None and now < self._ends:
            return
        if code is None:
            self._runs.kill()
            self._runs.wait(10)
        self._runs = None
        if code == 0:
            self.is_ready, self._failed = True, itertools.count(1)
        elif next(self._failed) >= self._settings.get("failureThreshold", 3):
            self.is_ready = False


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
