"""Which run of which task makes an artifact, where that is on a cluster.

There no database is at hand, so the artifact's manifest says it. On one machine the run's recorder
does.
"""

import time
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class StageRun(BaseModel):
    """One attempt at a stage.

    Attributes:
        execution: Flyte's name of the execution.
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
    def here(cls, environment: Mapping[str, str], *, task: str) -> "StageRun | None":
        """The attempt that begins now, if the environment is that of a container of Flyte's."""
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
