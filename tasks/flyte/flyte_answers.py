"""Explains errors of Flyte's client if a cluster does not answer or refuses."""

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
    "look at endpoint, insecure and authType in the configuration (--flyte-config), and whether "
    "that project is there (flytectl create project)"
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
) -> Iterator[None]:
    """Turns errors of a cluster into a `ResourceError` inside the `with` block.

    `problem` says what failed; `what` is what a healthy cluster accepts, such as "launch plans".
    """
    try:
        yield
    except NemoRLError:  # explained already
        raise
    except Exception as error:
        causes = list(_causes(error))
        if not any(isinstance(cause, _OF_A_CLUSTER) for cause in causes):
            raise
        raise ResourceError(
            f"{problem} on {endpoint}",
            expected=f"a Flyte 1.16 cluster that accepts {what} in {project}/{domain}",
            got=_message(causes),
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


def _message(causes: list[BaseException]) -> str:
    for cause in causes:
        if isinstance(cause, grpc.RpcError) and isinstance(cause, grpc.Call):
            return f"{cause.code().name}: {' '.join(str(cause.details()).split())}"[:400]
    first = next(cause for cause in causes if isinstance(cause, _OF_A_CLUSTER))
    return " ".join(str(first).split())[:400] or type(first).__name__
