"""A RayJob: its command and the pods of its cluster, made from its specification."""

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyteidl.core import tasks_pb2
from google.protobuf import json_format

from tests.workflows.cluster_bed.network import Network
from tests.workflows.cluster_bed.pod import Pod

GCS_PORT = 6379
_OBJECT_STORE_BYTES = 200_000_000
_START_SECONDS = 600.0  # a busy machine takes long to start three Ray nodes


def cluster_of_task(task: tasks_pb2.TaskTemplate) -> dict[str, Any]:
    """Returns the head and worker groups of a task for Flyte's Ray plugin."""
    cluster: dict[str, Any] = json_format.MessageToDict(task.custom)["rayCluster"]
    return cluster


def cluster_of_manifest(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the head and worker groups of the `rayClusterSpec` of a RayJob."""

    def group(manifest: Mapping[str, Any]) -> dict[str, Any]:
        return {**manifest, "k8sPod": {"podSpec": manifest["template"]["spec"]}}

    head = group(spec["headGroupSpec"])
    head["rayStartParams"] = {  # the bed's head has no dashboard
        key: value for key, value in head["rayStartParams"].items() if key != "dashboard-host"
    }
    return {
        "headGroupSpec": head,
        "workerGroupSpec": [group(each) for each in spec["workerGroupSpecs"]],
    }


class RayJob:
    """Runs from the first pod to the end of the command; a `Container`.

    Args:
        network: Network of the pods.
        cluster: Head and worker groups, as in a task's `custom`.
        command: Command to run in the head pod.
        folder: Folder on this machine for logs: `log` for the command, and one file per pod.
        environment: Environment variables of all pods.
        volume: Folder that all pods share.
        pods_per_worker: Number of pods that each worker pod, with its CPUs, is divided into.

    Attributes:
        head: The head pod, which has no CPUs.
        workers: The worker pods.
        pid: Process id of the command.
    """

    def __init__(
        self,
        network: Network,
        cluster: Mapping[str, Any],
        command: list[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        volume: Path,
        pods_per_worker: int = 1,
    ) -> None:
        self._network, self._folder, self._volume = network, folder, volume
        self._environment = {"RAY_USAGE_STATS_ENABLED": "0", **environment}
        self.workers: list[Pod] = []
        self._command: subprocess.Popen[bytes] | None = None
        self._head_spec = cluster["headGroupSpec"]["k8sPod"]["podSpec"]
        try:
            self.head = self._start_head(cluster["headGroupSpec"])
            self._await(self._gcs_is_up, "the head's control store")
            for group in cluster["workerGroupSpec"]:
                self._start_workers(group, pods_per_worker)
            self._await(lambda: self._num_nodes() == 1 + len(self.workers), "all Ray nodes")
            self._command = self.head.run(
                command, {**self._environment, "RAY_ADDRESS": f"{self.head.address}:{GCS_PORT}"}
            )
        except BaseException:
            self.remove()
            raise
        self.pid = self._command.pid

    def poll(self) -> int | None:
        """Returns the command's exit code, or None while it runs. It ends with the head pod."""
        assert self._command is not None
        if self.head.poll() is not None and self._command.poll() is None:
            self._command.kill()
        return self._command.poll()

    def evict_head(self) -> None:
        """Ends the head pod as on a drained machine, with the hook and grace of its spec."""
        hook = self._head_spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        self.head.stop(hook, grace_seconds=self._head_spec["terminationGracePeriodSeconds"])

    def remove(self) -> None:
        """Ends all pods, as KubeRay does after the job."""
        for pod in [*self.workers, *([self.head] if hasattr(self, "head") else [])]:
            pod.remove()
        if self._command is not None:
            self._command.wait(60)

    def _start_head(self, group: Mapping[str, Any]) -> Pod:
        options = [f"--{key}={value}" for key, value in group["rayStartParams"].items()]
        return self._start(
            "ray-head", "--head", f"--port={GCS_PORT}", "--include-dashboard=false", *options
        )

    def _start_workers(self, group: Mapping[str, Any], pods_per_worker: int) -> None:
        spec = group["k8sPod"]["podSpec"]
        cores = int(spec["containers"][0]["resources"]["limits"]["cpu"]) // pods_per_worker
        for _ in range(int(group["replicas"]) * pods_per_worker):
            address = f"--address={self.head.address}:{GCS_PORT}"
            name = f"ray-{group['groupName']}-{len(self.workers)}"
            self.workers.append(self._start(name, address, f"--num-cpus={cores}"))

    def _start(self, name: str, *options: str) -> Pod:
        memory = f"--object-store-memory={_OBJECT_STORE_BYTES}"
        return Pod(
            self._network,
            name,
            ["ray", "start", "--block", "--disable-usage-stats", memory, *options],
            self._environment,
            log=self._folder / ("log" if name == "ray-head" else f"log-{name}"),
            volume=self._volume,
        )

    def _await(self, is_so: Any, what: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not is_so():
            for pod in [self.head, *self.workers]:
                if pod.poll() is not None or time.monotonic() > deadline:
                    logs = "\n".join(p.read_text()[-2000:] for p in self._folder.glob("log*"))
                    raise TimeoutError(f"{what} did not come up\n{logs}")
            time.sleep(0.1)

    def _gcs_is_up(self) -> bool:
        import socket

        try:
            socket.create_connection((self.head.address, GCS_PORT), timeout=1).close()
        except OSError:
            return False
        return True

    def _num_nodes(self) -> int:
        from ray._raylet import GcsClient

        client = GcsClient(address=f"{self.head.address}:{GCS_PORT}")
        alive = 0  # ALIVE, as Ray's GcsNodeInfo.GcsNodeState counts
        return sum(node.state == alive for node in client.get_all_node_info(timeout=10).values())
