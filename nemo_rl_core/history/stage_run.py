"""What a stage on a cluster writes of itself into its artifact, where no database is at hand.

Apart from the database, so that a change there is no change of the stages' source.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_rl_core.infra.files import write_atomic
from nemo_rl_core.infra.produce import RECORD, Made


@dataclass(frozen=True)
class StageRun:
    """Which run of which task an artifact was made by.

    Attributes:
        execution: Flyte's name of the execution.
        workflow: Such as `workflows.grpo.grpo`.
        attempt: 1 for the first.
        parents: Ids of the artifacts that the stage read, by the input's name.
    """

    execution: str
    workflow: str
    task: str
    attempt: int
    started_at: float
    parents: dict[str, str]


def recorded(
    work: Callable[[Path], Made],
    environment: Mapping[str, str],
    *,
    task: str,
    parents: Mapping[str, Path],
) -> Callable[[Path], Made]:
    """A stage's work that also writes its record, where Flyte's container says whose it is."""
    execution = environment.get("FLYTE_INTERNAL_EXECUTION_ID")
    if execution is None:
        return work

    def work_and_record(folder: Path) -> Made:
        run = StageRun(
            execution=execution,
            workflow=environment.get("FLYTE_INTERNAL_EXECUTION_WORKFLOW", ""),
            task=task,
            attempt=1 + int(environment.get("FLYTE_ATTEMPT_NUMBER", "0")),
            started_at=time.time(),
            parents={role: parent.name for role, parent in parents.items()},
        )
        made = work(folder)
        write_atomic(folder / RECORD, json.dumps(asdict(run), indent=1))
        return made

    return work_and_record
