"""The run on a cluster that makes an artifact, recorded in its manifest.

On a cluster no stage can write the history database. On one machine the run's recorder writes it.
"""

import time
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class StageRun(BaseModel):
    """One attempt of a stage.

    Attributes:
        execution: Name of the execution in Flyte.
        workflow: Such as `workflows.grpo.grpo`.
        task: Such as `tasks.train_sft.train_sft`.
        attempt: 1 for the first.
        started_at: Seconds since 1970.
    """

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
