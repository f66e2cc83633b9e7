"""Errors that Flyte retries: error documents, as a container writes them."""

import errno
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from botocore.exceptions import ClientError, EndpointConnectionError
from flyteidl.core import errors_pb2
from flytekit import FlyteContextManager, task
from flytekit.bin import entrypoint
from flytekit.models.literals import LiteralMap
from huggingface_hub.errors import HfHubHTTPError
from s3fs.errors import translate_boto_error

from nemo_rl_core.errors import (
    ConfigError,
    DataError,
    MachineError,
    ModelError,
    ResourceError,
    StoreError,
    TransferError,
    WorkerError,
    WorkerLostError,
)
from tasks.flyte import local
from tasks.flyte.retries import is_recoverable, retried_on_cluster

RAISED: list[BaseException] = []


@task
def stage() -> int:
    with retried_on_cluster():
        if RAISED:
            raise RAISED[-1]
    return 0


# Errors of Ray are made when they are needed: Ray is set up by its first import.
def in_a_worker(cause: Exception) -> BaseException:
    from ray.exceptions import RayTaskError

    return RayTaskError("step", "a trace", cause)


def dead(kind: str) -> BaseException:
    import ray.exceptions

    return getattr(ray.exceptions, kind)()  # type: ignore[no-any-return]


def not_started(cause: Exception) -> BaseException:
    from ray.exceptions import ActorDiedError, RayTaskError

    return ActorDiedError(RayTaskError("__init__", "a trace", cause))


def refused_by_ray() -> BaseException:
    from ray.exceptions import AuthenticationError

    return AuthenticationError("InvalidAuthToken")


def caused(error: Exception, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def translated_503() -> BaseException:
    """An error of botocore, as s3fs raises it."""
    answer = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}
    return translate_boto_error(ClientError(answer, "GetObject"))  # type: ignore[no-any-return]


def hub_error(status: int) -> BaseException:
    answer = httpx.Response(status, request=httpx.Request("GET", "https://hub"))
    return HfHubHTTPError("the hub", response=answer)


RECOVERABLE: dict[str, Callable[[], BaseException]] = {
    "a lost worker": lambda: WorkerLostError("worker 3 of 'training' died", got="node died"),
    "a broken transfer": lambda: TransferError("a weight transfer was interrupted"),
    "a dead actor": lambda: dead("ActorDiedError"),
    "a crashed worker": lambda: dead("WorkerCrashedError"),
    "a transfer in a worker": lambda: in_a_worker(TransferError("a transfer broke off")),
    "CUDA in a worker": lambda: WorkerError(
        "worker 0 of 'training' raised AcceleratorError", got="CUDA error: an illegal address"
    ),
    "a rank that did not join": lambda: MachineError("rank 3 did not join the check"),
    "a wrong sum in a worker": lambda: in_a_worker(MachineError("a sum is wrong on rank 3")),
    "the store of ranks": lambda: WorkerError("worker 0 raised DistStoreError: wait timeout"),
    "gloo": lambda: RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
    "a stale volume": lambda: OSError(errno.ESTALE, "Stale file handle"),
    "a busy bucket": lambda: caused(StoreError("cannot be read"), translated_503()),
    "no way to the bucket": lambda: EndpointConnectionError(endpoint_url="http://s3"),
    "a hub that is down": lambda: caused(ModelError("cannot be downloaded"), hub_error(503)),
    "a hub that is away": lambda: caused(RuntimeError("no"), httpx.ConnectError("refused")),
    "NCCL": lambda: RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled"),
}
FINAL: dict[str, Callable[[], BaseException]] = {
    "a recipe": lambda: ConfigError("unknown key 'grpo.lerning_rate'"),
    "rows": lambda: DataError("prompt is empty: rows 3", got="NCCL"),
    "a model": lambda: ModelError("the model's config.json cannot be read"),
    "a row in a worker": lambda: in_a_worker(DataError("a sequence does not fit")),
    "a bug in a worker": lambda: WorkerError("worker 0 raised KeyError", got="'advantages'"),
    "a model that the hub has not": lambda: caused(ModelError("unknown"), hub_error(404)),
    "a file that is not there": lambda: FileNotFoundError(errno.ENOENT, "no such file"),
    "a bucket that is closed": lambda: PermissionError(errno.EACCES, "Access Denied"),
    "a full disk": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "a recipe's address": lambda: caused(ConfigError("data.train"), ConnectionError()),
    "a bug": lambda: KeyError("advantages"),
    "memory of a GPU": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    "memory of a GPU, in a worker": lambda: in_a_worker(torch.OutOfMemoryError("CUDA out of")),
    "memory of a GPU, described": lambda: ResourceError("worker 0 of 'training' needs more GPU"),
    "memory of a GPU, by CUDA": lambda: RuntimeError("CUDA error: out of memory"),
    "memory of a GPU, by cuBLAS": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
    "memory of a GPU, by NCCL": lambda: RuntimeError("NCCL WARN Cuda failure 2 'out of memory'"),
    "memory of the host": lambda: MemoryError("Unable to allocate 2. GiB"),
    "memory in a worker": lambda: in_a_worker(MemoryError("Unable to allocate 2. GiB")),
    "a token outside the vocabulary": lambda: WorkerError(
        "worker 0 raised AcceleratorError: CUDA error: device-side assert triggered"
    ),
    "kernels of another GPU": lambda: RuntimeError("CUDA error: no kernel image is available"),
    "two ranks on a GPU": lambda: RuntimeError("NCCL error: Duplicate GPU detected: rank 0, 1"),
    "a call of NCCL": lambda: RuntimeError("NCCL error: ncclInvalidUsage: too many devices"),
    "torch for CPUs": lambda: RuntimeError("Distributed package doesn't have NCCL built in"),
    "a driver that is too old": lambda: RuntimeError(
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version"
    ),
    "a worker that cannot start": lambda: not_started(ValueError("no such backend")),
    "an environment that Ray cannot make": lambda: dead("RuntimeEnvSetupError"),
    "a token that Ray refuses": refused_by_ray,
}


@pytest.mark.parametrize("name", [*RECOVERABLE, *FINAL])
@pytest.mark.parametrize("on_cluster", [True, False])
def test_the_document_of_an_error_says_whether_another_attempt_is_made(
    name: str, on_cluster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RAISED[:] = [{**RECOVERABLE, **FINAL}[name]()]
    monkeypatch.setattr(local, "on_cluster", lambda: on_cluster)
    inputs = tmp_path / "inputs.pb"
    inputs.write_bytes(LiteralMap({}).to_flyte_idl().SerializeToString())
    run_as_container(inputs, tmp_path / "out")
    error = errors_pb2.ErrorDocument.FromString((tmp_path / "out/error.pb").read_bytes()).error
    is_expected = on_cluster and name in RECOVERABLE
    assert (error.kind == errors_pb2.ContainerError.RECOVERABLE) == is_expected
    assert str(RAISED[-1]).splitlines()[0].strip("'") in error.message


def run_as_container(inputs: Path, outputs: Path) -> None:
    outputs.mkdir()
    with entrypoint.setup_execution(raw_output_data_prefix=str(outputs / "raw")):
        context = FlyteContextManager.current_context()
        entrypoint._dispatch_execute(context, lambda: stage, str(inputs), str(outputs))


def test_recoverable_errors_are_recognized() -> None:
    assert all(is_recoverable(make()) for make in RECOVERABLE.values())
    assert not any(is_recoverable(make()) for make in FINAL.values())
