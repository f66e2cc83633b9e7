"""Errors after which Flyte retries a stage: those of machines, not of recipes and data."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytekit.exceptions.user import FlyteRecoverableException

from nemo_rl_core.errors import ConfigError, MachineError, NemoRLError, WorkerError
from tasks.flyte import local

# The wording of torch, NCCL, gloo and Ray; workers pass on the text of their errors.
_OF_A_MACHINE = re.compile(
    r"CUDA error|NCCL|CUBLAS_STATUS|cudaError"
    r"|Dist(Backend|Store|Network)Error|[Cc]onnection (closed|reset) by peer|Stale file handle"
)
# Errors of the same libraries that a recipe, a model or an installation causes on every machine.
_OF_A_RECIPE = re.compile(
    r"out of memory|OutOfMemoryError|ALLOC_FAILED|device-side assert|no kernel image"
    r"|insufficient for CUDA runtime|invalid (argument|configuration|device|usage|resource handle)"
    r"|ncclInvalid|INVALID_VALUE|NOT_SUPPORTED|ARCH_MISMATCH|not built with|NCCL built in"
    r"|Duplicate GPU detected",
    re.IGNORECASE,
)
_OF_A_RAY_SETUP = (
    "AuthenticationError",
    "ActorUnschedulableError",
    "RuntimeEnvSetupError",
    "TaskUnschedulableError",
)
"""Errors of Ray about its configuration, or about resources that the cluster does not have."""

_OF_A_DISK_OR_NETWORK = {
    getattr(errno, name)
    for name in (
        *("EIO", "EREMOTEIO", "ESTALE", "EBUSY", "EPIPE", "ECONNRESET", "ECONNREFUSED"),
        *("ECONNABORTED", "ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH", "ENETDOWN"),
    )
    if hasattr(errno, name)
}
_OF_A_CONNECTION = {"ConnectionError", "ClientConnectionError", "HTTPClientError", "TransportError"}
"""Base classes in requests, aiohttp, botocore and httpx, by name: most are not imported here."""

_TOO_MANY_REQUESTS, _FIRST_OF_A_SERVER = 429, 500


def is_recoverable(error: BaseException) -> bool:
    """Returns whether another attempt, perhaps on other machines, could succeed.

    True for errors of workers, transfers, CUDA, NCCL, disks and connections. False for errors of
    recipes, data, models and rewards, and for a lack of memory: the next attempt has as much.
    """
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, MachineError):
        return True
    if isinstance(error, RayTaskError):
        return error.cause is not None and is_recoverable(error.cause)
    if isinstance(error, RayError):
        has_started = not getattr(error, "actor_init_failed", False)
        return has_started and type(error).__name__ not in _OF_A_RAY_SETUP
    if isinstance(error, ConfigError):
        return False
    if any(map(_is_of_a_machine, _chain(error))):
        return True
    is_explained = isinstance(error, NemoRLError) and not isinstance(error, WorkerError)
    text = f"{type(error).__name__}: {error}"
    is_machines = _OF_A_MACHINE.search(text) and not _OF_A_RECIPE.search(text)
    return not is_explained and bool(is_machines)


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )


def _is_of_a_machine(error: BaseException) -> bool:
    if isinstance(error, MachineError | ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno in _OF_A_DISK_OR_NETWORK:
        return True
    status = _http_status(getattr(error, "response", None))
    if status == _TOO_MANY_REQUESTS or status >= _FIRST_OF_A_SERVER:
        return True
    return any(base.__name__ in _OF_A_CONNECTION for base in type(error).__mro__)


def _http_status(response: Any) -> int:
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    status = getattr(response, "status_code", response)
    return status if isinstance(status, int) else 0


@contextmanager
def retried_on_cluster() -> Iterator[None]:
    """Marks recoverable errors as such for Flyte, which then tries again; not in a local run."""
    try:
        yield
    except Exception as error:
        if not local.on_cluster() or not is_recoverable(error):
            raise
        raise FlyteRecoverableException(f"{type(error).__name__}: {error}") from error
