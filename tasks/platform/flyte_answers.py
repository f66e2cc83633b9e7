"""What Flyte's client raises where a cluster does not answer or refuses, in four lines."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import grpc
from flytekit.clients.auth.exceptions import AccessTokenNotFoundError, AuthenticationError
from flytekit.exceptions.system import FlyteSystemException
from flytekit.exceptions.user import (
    FlyteAuthenticationException,
    FlyteEntityNotExistException,
    FlyteInvalidInputException,
    FlyteTimeout,
)
from flytekit.remote import FlyteRemote
from requests import RequestException

from nemo_rl_core.errors import NemoRLError, ResourceError

_OF_A_CLUSTER = (
    FlyteSystemException,
    FlyteAuthenticationException,
    FlyteEntityNotExistException,
    FlyteInvalidInputException,
    FlyteTimeout,
    AccessTokenNotFoundError,
    AuthenticationError,
    RequestException,  # the upload of the code, which does not go through Flyte
    grpc.RpcError,
)


_FIX = (
    "look at endpoint, insecure and authType in the configuration (--config), and whether that "
    "project is there (flytectl create project)"
)


@contextmanager
def explained_answers(
    problem: str,
    endpoint: str,
    *,
    project: str,
    domain: str,
    what: str,
    fix: str = _FIX,
    passed: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Within it, errors of a cluster become a `ResourceError`.

    Args:
        problem: What cannot be done.
        endpoint: Of Flyte.
        project: On the cluster.
        domain: Of the project.
        what: The cluster takes where all is well.
        fix: What the user does.
        passed: Answers that the caller expects; they are raised as they are.

    Raises:
        ResourceError: If the cluster does not answer, does not know who asks, or refuses. Other
            errors are raised as they are.
    """
    try:
        yield
    except NemoRLError:  # explained already
        raise
    except Exception as error:
        if isinstance(error, passed):
            raise
        causes = list(_causes(error))
        if not any(isinstance(cause, _OF_A_CLUSTER) for cause in causes):
            raise
        raise ResourceError(
            f"{problem} on {endpoint}",
            expected=f"a Flyte 1.16 that takes {what} in {project}/{domain}",
            got=_said(causes),
            fix=fix,
        ) from error


def explain_uploads() -> None:
    """Explains the errors of `pyflyte run --remote` if the code cannot be uploaded; idempotent."""
    if not hasattr(FlyteRemote.upload_file, "__wrapped__"):
        FlyteRemote.upload_file = _explained(FlyteRemote.upload_file)


def _explained(original: Any) -> Any:
    @functools.wraps(original)
    def upload_file(self: FlyteRemote, *args: Any, **kwargs: Any) -> Any:
        try:
            with explained_answers(
                "the code cannot be uploaded to the cluster",
                self.config.platform.endpoint,
                project=self.default_project,
                domain=self.default_domain,
                what="uploads",
                fix="start a Flyte cluster and name it in ~/.flyte/config.yaml "
                "(docs/clusters.md), or run on this machine, without --remote",
            ):
                return original(self, *args, **kwargs)
        except ResourceError as error:
            raise click.ClickException(str(error)) from error

    return upload_file


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _said(causes: list[BaseException]) -> str:
    """What the service itself said, or else the first error that is of one."""
    for cause in causes:
        if isinstance(cause, grpc.RpcError) and isinstance(cause, grpc.Call):
            return f"{cause.code().name}: {' '.join(str(cause.details()).split())}"[:400]
    first = next(cause for cause in causes if isinstance(cause, _OF_A_CLUSTER))
    return " ".join(str(first).split())[:400] or type(first).__name__
