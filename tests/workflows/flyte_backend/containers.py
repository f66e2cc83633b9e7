"""A task's container as a process: its real command, in a folder that stands for the pod."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flyteidl.core import errors_pb2, literals_pb2, tasks_pb2

from tests.workflows.flyte_backend.records import Attempt

_BIN = Path(sys.executable).parent
_KEPT = ("LANG", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Place:
    """Where an attempt reads and writes.

    Attributes:
        outputs: Metadata of the node: `outputs.pb`, `futures.pb` or `error.pb`, and the deck.
        raw: Files and folders that it hands on.
        checkpoint: Where this attempt may leave what the next one goes on from.
        previous_checkpoint: What the attempt before left; None for the first.
    """

    pod: Path
    inputs: Path
    outputs: Path
    raw: Path
    checkpoint: Path
    previous_checkpoint: Path | None


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
    command = _command(task.container.args, place)
    for folder in (place.outputs, place.raw, place.checkpoint, place.pod / "home"):
        folder.mkdir(parents=True, exist_ok=True)
    process = _start(command, task, place.pod, environment)
    attempt = Attempt(number, command, place.pod, place.checkpoint, process.pid)
    started(attempt)
    seconds = task.metadata.timeout.seconds or None
    attempt.exit_code = _wait(process, aborted, seconds)
    _take_disk(place.pod)
    for name in ("outputs.pb", "futures.pb"):
        if attempt.exit_code == 0 and (place.outputs / name).exists():
            return name, (place.outputs / name).read_bytes()
    attempt.error, may_retry = _error(place.outputs, attempt)
    raise ContainerError(attempt.error, may_retry=may_retry)


def read_outputs(content: bytes) -> literals_pb2.LiteralMap:
    """The literals of an `outputs.pb`."""
    return literals_pb2.LiteralMap.FromString(content)


def _command(args: list[str], place: Place) -> list[str]:
    previous = str(place.previous_checkpoint) if place.previous_checkpoint else '""'
    meant = {
        "{{.input}}": str(place.inputs),
        "{{.outputPrefix}}": str(place.outputs),
        "{{.rawOutputDataPrefix}}": str(place.raw),
        "{{.checkpointOutputPrefix}}": str(place.checkpoint),
        "{{.prevCheckpointPrefix}}": previous,
    }
    return [meant.get(argument, argument) for argument in args]


def _start(
    command: list[str], task: tasks_pb2.TaskTemplate, pod: Path, environment: dict[str, str]
) -> "subprocess.Popen[bytes]":
    own = {key: value for key, value in os.environ.items() if key in _KEPT}
    own |= {pair.key: pair.value for pair in task.container.env}
    own |= {
        # An image has flytekit's programs on its path; here they lie beside this very Python.
        "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(pod / "home"),
        "NEMO_RL_HOME": str(pod / "store"),
        # The code is what the distribution unpacks into the working directory, and nothing else.
        "PYTHONPATH": str(pod / "code"),
        "FLYTE_INTERNAL_TASK_PROJECT": task.id.project,
        "FLYTE_INTERNAL_TASK_DOMAIN": task.id.domain,
        "FLYTE_INTERNAL_TASK_NAME": task.id.name,
        "FLYTE_INTERNAL_TASK_VERSION": task.id.version,
        **environment,
    }
    (pod / "code").mkdir(exist_ok=True)
    with (pod / "log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=pod / "code", env=own, stdout=log, stderr=log, start_new_session=True
        )


def _wait(
    process: "subprocess.Popen[bytes]", aborted: threading.Event, seconds: float | None
) -> int:
    waited = 0.0
    while True:
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            waited += 0.2
        if aborted.is_set() or (seconds is not None and waited > seconds):
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


def _take_disk(pod: Path) -> None:
    """A pod's disk goes with the pod: what the next stage needs has gone to the bucket."""
    for entry in pod.iterdir():
        if entry.name != "log":
            shutil.rmtree(entry, ignore_errors=True)


def _error(outputs: Path, attempt: Attempt) -> tuple[str, bool]:
    written = outputs / "error.pb"
    if not written.exists():
        last = "\n".join(attempt.log.splitlines()[-15:])
        return f"the container ended with {attempt.exit_code} and no result\n{last}", True
    error = errors_pb2.ErrorDocument.FromString(written.read_bytes()).error
    return error.message, error.kind == errors_pb2.ContainerError.RECOVERABLE
