"""The run on a cluster that makes an artifact, recorded in its manifest instead of the history."""

import time
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class StageRun(BaseModel):
    """One attempt of a stage; the number `attempt` counts from 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    execution: str
    workflow: str
    task: str
    attempt: int
    started_at: float

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, task: str) -> "StageRun | None":
        """Returns the attempt that starts now; None outside of a Flyte container."""
        execution = environment.get("FLYTE_INTERNAL_EXECUTION_ID")
        if execution is None:
            return None
        return cls(
            execution=execution,
            workflow=environment.get("FLYTE_INTERNAL_EXECUTION_WORKFLOW", ""),
            task=task,
            attempt=1 + int(environment.get("FLYTE_ATTEMPT_NUMBER", "0")),
            started_at=time.time(),
        )
