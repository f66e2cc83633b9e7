"""Runs a task's container with its real command and reads its results from the bucket."""

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
from typing import Any, Protocol

from flyteidl.core import errors_pb2, literals_pb2, tasks_pb2
from google.protobuf import json_format

from tests.workflows.flyte_backend.buckets import Bucket
from tests.workflows.flyte_backend.records import Attempt

_BIN = Path(sys.executable).parent
_KEPT = ("LANG", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Locations:
    """Locations that an attempt reads and writes: paths in the bucket, except for `pod`.

    Attributes:
        pod: Folder on this machine for the container's log, and for its disk if it has no other.
        inputs: File with the inputs of the node.
        outputs: Folder for `outputs.pb`, `futures.pb` or `error.pb`, and the deck.
        raw: Folder for files and folders among the outputs.
        checkpoint: Folder for state that the next attempt can resume from.
        previous_checkpoint: `checkpoint` of the previous attempt; None for the first.
    """

    pod: Path
    inputs: str
    outputs: str
    raw: str
    checkpoint: str
    previous_checkpoint: str | None


class Container(Protocol):
    """A started container.

    Attributes:
        pid: Id of its first process on this machine.
    """

    pid: int

    def poll(self) -> int | None:
        """Returns its exit code, or None while it runs."""
        ...

    def remove(self) -> None:
        """Ends it if it still runs, and removes its disk; the log stays."""
        ...


class Machine(Protocol):
    """Starts containers."""

    def start(
        self,
        task: tasks_pb2.TaskTemplate,
        command: list[str],
        pod: Path,
        environment: dict[str, str],
    ) -> Container:
        """Starts a container that writes its output to `pod / "log"`."""
        ...


class ContainerError(Exception):
    """A task that ended without outputs.

    Attributes:
        may_retry: False if the task reported that another attempt would fail too.
    """

    def __init__(self, message: str, *, may_retry: bool) -> None:
        super().__init__(message)
        self.may_retry = may_retry


def run_container(
    task: tasks_pb2.TaskTemplate,
    locations: Locations,
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
        started: Called with the attempt as soon as it has a process.
        aborted: Event that ends the attempt.

    Returns:
        Name of the file with its result, `outputs.pb` or `futures.pb`, and its content.

    Raises:
        ContainerError: If there is no result.
    """
    args, variables = _container_of(task)
    command = _command(args, locations, bucket)
    variables |= {
        "FLYTE_INTERNAL_TASK_PROJECT": task.id.project,
        "FLYTE_INTERNAL_TASK_DOMAIN": task.id.domain,
        "FLYTE_INTERNAL_TASK_NAME": task.id.name,
        "FLYTE_INTERNAL_TASK_VERSION": task.id.version,
    }
    container = machine.start(task, command, locations.pod, variables | environment)
    try:
        attempt = Attempt(
            number, command, locations.pod, bucket.folder(locations.checkpoint), container.pid
        )
        started(attempt)
        attempt.exit_code = _wait(container, aborted, task.metadata.timeout.seconds or None)
    finally:
        container.remove()
    for name in ("outputs.pb", "futures.pb"):
        content = bucket.read(f"{locations.outputs}/{name}")
        if attempt.exit_code == 0 and content is not None:
            return name, content
    attempt.error, attempt.may_retry = _error(bucket.read(f"{locations.outputs}/error.pb"), attempt)
    raise ContainerError(attempt.error, may_retry=attempt.may_retry is not False)


def read_outputs(content: bytes) -> literals_pb2.LiteralMap:
    """Parses the content of an `outputs.pb`."""
    return literals_pb2.LiteralMap.FromString(content)


def pod_spec_of(task: tasks_pb2.TaskTemplate) -> dict[str, Any]:
    """Returns the pod spec of a task; empty if it only has a container."""
    spec: dict[str, Any] = _integers(json_format.MessageToDict(task.k8s_pod.pod_spec))
    return spec


def _integers(value: Any) -> Any:
    """Converts floats to integers: a struct stores all numbers as floats, and a pod has none."""
    if isinstance(value, dict):
        return {key: _integers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_integers(each) for each in value]
    return int(value) if isinstance(value, float) else value


def _container_of(task: tasks_pb2.TaskTemplate) -> tuple[list[str], dict[str, str]]:
    if not task.HasField("k8s_pod"):
        return list(task.container.args), {pair.key: pair.value for pair in task.container.env}
    primary = task.config["primary_container_name"]
    (main,) = [c for c in pod_spec_of(task)["containers"] if c["name"] == primary]
    return main["args"], {each["name"]: each["value"] for each in main["env"] if "value" in each}


def _command(args: list[str], locations: Locations, bucket: Bucket) -> list[str]:
    previous = locations.previous_checkpoint
    values = {
        "{{.input}}": bucket.url(locations.inputs),
        "{{.outputPrefix}}": bucket.folder(locations.outputs),
        "{{.rawOutputDataPrefix}}": bucket.folder(locations.raw),
        "{{.checkpointOutputPrefix}}": bucket.folder(locations.checkpoint),
        "{{.prevCheckpointPrefix}}": bucket.folder(previous) if previous else '""',
    }
    return [values.get(argument, argument) for argument in args]


class Processes:
    """Starts containers as processes of this machine, each with a folder as its disk."""

    def start(
        self,
        task: tasks_pb2.TaskTemplate,
        command: list[str],
        pod: Path,
        environment: dict[str, str],
    ) -> "ProcessContainer":
        variables = {key: value for key, value in os.environ.items() if key in _KEPT}
        variables |= {
            # Images have flytekit's programs on their path; here they are next to this Python.
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(pod / "home"),
            "NEMO_RL_HOME": str(pod / "store"),
            # The only code is what the distribution unpacks into the working directory.
            "PYTHONPATH": str(pod / "code"),
            **environment,
        }
        for folder in ("code", "home"):
            (pod / folder).mkdir(exist_ok=True)
        with (pod / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=pod / "code",
                env=variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return ProcessContainer(process, pod)


class ProcessContainer:
    """A process group and the folder that serves as its disk.

    Attributes:
        pid: Id of the group.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", pod: Path) -> None:
        self._process, self._pod, self.pid = process, pod, process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def remove(self) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        # A pod's disk is removed with the pod; the next stage reads only from the bucket.
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
