"""Errors after which Flyte tries a stage again: those of machines, not of recipes and data."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from flytekit.exceptions.user import FlyteRecoverableException

from nemo_rl_core.errors import NemoRLError, TransferError, WorkerError, WorkerLostError
from tasks.platform import local

# As torch, NCCL and Ray word them; a worker hands on the text of what it raised.
_OF_A_MACHINE = re.compile(
    r"CUDA error|CUDA out of memory|OutOfMemoryError|NCCL|DistBackendError|CUBLAS_STATUS|cudaError"
)


def is_recoverable(error: BaseException) -> bool:
    """Returns True if another attempt, on other machines, may not meet the error.

    A lost worker or node, a transfer of weights that broke off, and what CUDA, NCCL and memory
    raise are recoverable. A recipe, data, a model or a reward that cannot be used is not.
    """
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, WorkerLostError | TransferError):
        return True
    if isinstance(error, RayTaskError):
        return error.cause is not None and is_recoverable(error.cause)
    if isinstance(error, RayError):
        return True
    is_explained = isinstance(error, NemoRLError) and not isinstance(error, WorkerError)
    return not is_explained and bool(_OF_A_MACHINE.search(f"{type(error).__name__}: {error}"))


@contextmanager
def retried_on_cluster() -> Iterator[None]:
    """Tells Flyte of recoverable errors that they are; a local run is left as it is.

    Raises:
        FlyteRecoverableException: In place of a recoverable error, in a container of a cluster. The
            next attempt goes on from the last save.
    """
    try:
        yield
    except Exception as error:
        if not local.on_cluster() or not is_recoverable(error):
            raise
        raise FlyteRecoverableException(f"{type(error).__name__}: {error}") from error
