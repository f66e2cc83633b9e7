"""A task's container: its real command, on what starts it, and what it leaves in the bucket."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flyteidl.core import errors_pb2, literals_pb2, tasks_pb2
from google.protobuf import json_format

from tests.workflows.flyte_backend.buckets import Bucket
from tests.workflows.flyte_backend.records import Attempt

_BIN = Path(sys.executable).parent
_KEPT = ("LANG", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Place:
    """Where an attempt reads and writes; paths in the bucket, but for the pod.

    Attributes:
        pod: A folder of this machine for the container's log, and for its disk where it has no
            other.
        outputs: Metadata of the node: `outputs.pb`, `futures.pb` or `error.pb`, and the deck.
        raw: Files and folders that it hands on.
        checkpoint: Where this attempt may leave what the next one goes on from.
        previous_checkpoint: What the attempt before left; None for the first.
    """

    pod: Path
    inputs: str
    outputs: str
    raw: str
    checkpoint: str
    previous_checkpoint: str | None


class Container(Protocol):
    """A started one.

    Attributes:
        pid: Of its first process, as this machine counts.
    """

    pid: int

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    def remove(self) -> None:
        """Ends it, if it still runs, and what it had on its disk; the log stays."""
        ...


class Machine(Protocol):
    """What starts containers."""

    def start(
        self,
        task: tasks_pb2.TaskTemplate,
        command: list[str],
        pod: Path,
        environment: dict[str, str],
    ) -> Container:
        """Starts one, with its output in `pod / "log"`."""
        ...


class ContainerError(Exception):
    """A task that ended without outputs.

    Attributes:
        may_retry: False where the task itself said that another attempt is of no use.
    """

    def __init__(self, message: str, *, may_retry: bool) -> None:
        super().__init__(message)
        self.may_retry = may_retry


def run_container(
    task: tasks_pb2.TaskTemplate,
    place: Place,
    number: int,
    *,
    bucket: Bucket,
    machine: Machine,
    environment: dict[str, str],
    started: Callable[[Attempt], None],
    aborted: threading.Event,
) -> tuple[str, bytes]:
    """Runs one attempt to its end.

    Args:
        started: Told of the attempt as soon as it has a process.
        aborted: Ends it, when set.

    Returns:
        The file that holds its result, `outputs.pb` or `futures.pb`, and the bytes in it.

    Raises:
        ContainerError: If there is no result.
    """
    args, own = _container(task)
    command = _command(args, place, bucket)
    own |= {
        "FLYTE_INTERNAL_TASK_PROJECT": task.id.project,
        "FLYTE_INTERNAL_TASK_DOMAIN": task.id.domain,
        "FLYTE_INTERNAL_TASK_NAME": task.id.name,
        "FLYTE_INTERNAL_TASK_VERSION": task.id.version,
    }
    container = machine.start(task, command, place.pod, own | environment)
    try:
        attempt = Attempt(
            number, command, place.pod, bucket.folder(place.checkpoint), container.pid
        )
        started(attempt)
        attempt.exit_code = _wait(container, aborted, task.metadata.timeout.seconds or None)
    finally:
        container.remove()
    for name in ("outputs.pb", "futures.pb"):
        content = bucket.read(f"{place.outputs}/{name}")
        if attempt.exit_code == 0 and content is not None:
            return name, content
    attempt.error, attempt.may_retry = _error(bucket.read(f"{place.outputs}/error.pb"), attempt)
    raise ContainerError(attempt.error, may_retry=attempt.may_retry is not False)


def read_outputs(content: bytes) -> literals_pb2.LiteralMap:
    """The literals of an `outputs.pb`."""
    return literals_pb2.LiteralMap.FromString(content)


def _container(task: tasks_pb2.TaskTemplate) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of its only container, or of the primary one of its pod.

    What a pod's environment takes from fields of the pod is left to the machine.
    """
    if task.HasField("container"):
        return list(task.container.args), {pair.key: pair.value for pair in task.container.env}
    name = task.config["primary_container_name"]
    spec = json_format.MessageToDict(task.k8s_pod.pod_spec)
    (container,) = [each for each in spec["containers"] if each["name"] == name]
    pairs = container.get("env", [])
    return container["args"], {p["name"]: p["value"] for p in pairs if "value" in p}


def _command(args: list[str], place: Place, bucket: Bucket) -> list[str]:
    previous = place.previous_checkpoint
    meant = {
        "{{.input}}": bucket.url(place.inputs),
        "{{.outputPrefix}}": bucket.folder(place.outputs),
        "{{.rawOutputDataPrefix}}": bucket.folder(place.raw),
        "{{.checkpointOutputPrefix}}": bucket.folder(place.checkpoint),
        "{{.prevCheckpointPrefix}}": bucket.folder(previous) if previous else '""',
    }
    return [meant.get(argument, argument) for argument in args]


class Processes:
    """Starts containers as processes of this machine, each with a folder as its disk."""

    def start(
        self,
        task: tasks_pb2.TaskTemplate,
        command: list[str],
        pod: Path,
        environment: dict[str, str],
    ) -> "ProcessContainer":
        own = {key: value for key, value in os.environ.items() if key in _KEPT}
        own |= {
            # An image has flytekit's programs on its path; here they lie beside this very Python.
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(pod / "home"),
            "NEMO_RL_HOME": str(pod / "store"),
            # The code is what the distribution unpacks into the working directory, nothing else.
            "PYTHONPATH": str(pod / "code"),
            **environment,
        }
        for folder in ("code", "home"):
            (pod / folder).mkdir(exist_ok=True)
        with (pod / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=pod / "code", env=own, stdout=log, stderr=log, start_new_session=True
            )
        return ProcessContainer(process, pod)


class ProcessContainer:
    """A process group, and the folder that is its disk.

    Attributes:
        pid: Of the group.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", pod: Path) -> None:
        self._process, self._pod, self.pid = process, pod, process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def remove(self) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        # A pod's disk goes with the pod: what the next stage needs has gone to the bucket.
        for entry in self._pod.iterdir():
            if entry.name != "log":
                shutil.rmtree(entry, ignore_errors=True)


def _wait(container: Container, aborted: threading.Event, seconds: float | None) -> int:
    deadline = float("inf") if seconds is None else time.monotonic() + seconds
    while (code := container.poll()) is None:
        if aborted.wait(0.2) or time.monotonic() > deadline:
            return -signal.SIGKILL
    return code


def _error(written: bytes | None, attempt: Attempt) -> tuple[str, bool | None]:
    if written is None:
        last = "\n".join(attempt.log.splitlines()[-15:])
        return f"the container ended with {attempt.exit_code} and no result\n{last}", None
    error = errors_pb2.ErrorDocument.FromString(written).error
    return error.message, error.kind == errors_pb2.ContainerError.RECOVERABLE
