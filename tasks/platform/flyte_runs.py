"""Executions of a launch plan, started and asked for from inside a pod."""

import os
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Self

from flytekit.clients.friendly import SynchronousFlyteClient
from flytekit.configuration import AuthType, PlatformConfig
from flytekit.exceptions.user import (
    FlyteEntityAlreadyExistsException,
    FlyteEntityNotExistException,
)
from flytekit.models.core.identifier import (
    Identifier,
    ResourceType,
    WorkflowExecutionIdentifier,
)
from flytekit.models.execution import ExecutionMetadata, ExecutionSpec
from flytekit.models.literals import LiteralMap

from tasks.platform.flyte_answers import explained_answers

URL, CLIENT_ID = "FLYTE_PLATFORM_URL", "FLYTE_CREDENTIALS_CLIENT_ID"
INSECURE = "FLYTE_PLATFORM_INSECURE"
"""flytekit's own variables; `FLYTE_CREDENTIALS_CLIENT_SECRET` belongs to the second."""

_FIX = (
    f"give the pods {URL}, an address of Flyte that they reach, {INSECURE} (true where it is "
    "without TLS, else false), and where it asks who they are "
    f"{CLIENT_ID} and FLYTE_CREDENTIALS_CLIENT_SECRET, as keys of the secret nemo-rl-secrets"
)


class FlyteRuns:
    """The executions of one version of a launch plan.

    Args:
        client: Of Flyte's admin service.
        plan: The launch plan.
        endpoint: The address of the service, for messages.
    """

    def __init__(self, client: SynchronousFlyteClient, plan: Identifier, *, endpoint: str) -> None:
        self._client, self._plan, self._endpoint = client, plan, endpoint

    @classmethod
    def of(
        cls, *, project: str, domain: str, name: str, version: str, endpoint: str, insecure: bool
    ) -> Self:
        """Those of a launch plan on the cluster that this pod belongs to.

        Args:
            project: Of the launch plan.
            domain: Likewise.
            name: Likewise.
            version: Likewise.
            endpoint: Where Flyte is asked, unless the environment names another place.
            insecure: Whether that is without TLS.
        """
        platform = PlatformConfig.auto()
        if URL not in os.environ:
            platform = replace(platform, endpoint=endpoint)
        if URL not in os.environ or INSECURE not in os.environ:
            platform = replace(platform, insecure=insecure)
        if CLIENT_ID in os.environ:
            platform = replace(platform, auth_mode=AuthType.CLIENTSECRET)
        plan = Identifier(ResourceType.LAUNCH_PLAN, project, domain, name, version)
        return cls(SynchronousFlyteClient(platform), plan, endpoint=platform.endpoint)

    def phase(self, name: str) -> int | None:
        """The phase of an execution; None where there was never one of that name.

        Raises:
            ResourceError: If Flyte does not answer.
        """
        identifier = WorkflowExecutionIdentifier(self._plan.project, self._plan.domain, name)
        try:
            with self._explained("it is not known which runs there were"):
                return int(self._client.get_execution(identifier).closure.phase)
        except FlyteEntityNotExistException:
            return None

    def start(self, name: str) -> bool:
        """Starts an execution with the inputs of the launch plan.

        Returns:
            False where there is one of that name, or the launch plan takes no other one now. Flyte
            1.16 answers both alike.

        Raises:
            ResourceError: If Flyte does not answer, or refuses.
        """
        mode = ExecutionMetadata.ExecutionMode.MANUAL
        spec = ExecutionSpec(self._plan, ExecutionMetadata(mode, "nemo-rl-flow", 0))
        project, domain = self._plan.project, self._plan.domain
        try:
            with self._explained(f"the run {name} cannot be started"):
                self._client.create_execution(project, domain, name, spec, LiteralMap({}))
        except FlyteEntityAlreadyExistsException:
            return False
        return True

    def _explained(self, problem: str) -> AbstractContextManager[None]:
        return explained_answers(
            problem,
            self._endpoint,
            project=self._plan.project,
            domain=self._plan.domain,
            what="executions",
            fix=_FIX,
            passed=(FlyteEntityAlreadyExistsException, FlyteEntityNotExistException),
        )
