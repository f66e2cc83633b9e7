"""A pipeline without its work: lists the cached stages, and the first one that would run.

The workflow is called as in a run. Model and data are really prepared, so that rows are read and
checked, and the run itself finds them cached; except with a tokenizer whose class is in the code of
the model, which a dry run does not run. Every other stage is only looked up. The first one without
an artifact ends the call, since everything after it depends on it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytekit.core.base_task import Task
from flytekit.core.workflow import WorkflowBase

from nemo_rl_core.checkpoints.model_code import has_tokenizer_code
from nemo_rl_core.config.model import ModelConfig, PretrainedModel
from nemo_rl_core.produce import NotMade, StageInputs, dry_run
from tasks.local_run.run import recording_by
from tasks.plan_tasks.failures import without_records

PREPARED = ("prepare_model", "prepare_data", "evaluate_questions")
"""Stages that a dry run executes."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage that the dry run reached.

    Attributes:
        name: Name in `nemo-rl runs`, such as `grpo_iteration 2`.
        state: `cached`, `prepared` (made by this dry run) or `runs`.
    """

    name: str
    state: str


class DryRun:
    """The stages of a pipeline up to the first that would run.

    Args:
        models: Models of the recipe.

    Attributes:
        stages: In the order of the calls.
        stopped_at: Inputs of the first stage that would run; None if all are cached.
    """

    def __init__(self, models: Sequence[ModelConfig] = ()) -> None:
        self._prepares = not any(map(_may_run_code, models))
        self.stages: list[PlannedStage] = []
        self.stopped_at: StageInputs | None = None
        self._executed: list[bool] = []

    def call(
        self, entity: Task | WorkflowBase, kwargs: dict[str, Any], execute: Callable[[], Any]
    ) -> Any:
        """Calls a node as `Recorder.call` does, without a record."""
        if not isinstance(entity, Task) or not entity.metadata.cache:
            return execute()
        name = _name(entity, kwargs)
        is_prepared = self._prepares and name in PREPARED
        self._executed.append(False)
        try:
            with nullcontext() if is_prepared else dry_run():
                returned = execute()
        except NotMade as missing:
            self.stages.append(PlannedStage(str(missing), "runs"))
            raise
        finally:
            executed = self._executed.pop()
        self.stages.append(PlannedStage(name, "prepared" if executed and is_prepared else "cached"))
        return returned

    def executes(self, task: Task) -> None:
        """Does nothing: flytekit has no outputs of this call, but the store may have them."""
        if self._executed and task.metadata.cache:
            self._executed[-1] = True

    def inside(self, task: Task, inputs: dict[str, Any], execute: Callable[[], Any]) -> Any:
        """Runs the function: only the stages of the workflow are listed."""
        return execute()


def call_dry(workflow: WorkflowBase, **inputs: Any) -> DryRun:
    """Calls a workflow without the stages that train, sample or evaluate."""
    result = DryRun(getattr(inputs.get("config"), "models", ()))
    with recording_by(result), without_records():
        try:
            workflow(**inputs)
        except NotMade as missing:
            result.stopped_at = missing.inputs
    return result


def _may_run_code(model: ModelConfig) -> bool:
    if not isinstance(model, PretrainedModel) or not model.trust_remote_code:
        return False
    folder = Path(model.name).expanduser()
    return not folder.is_dir() or has_tokenizer_code(folder)


def _name(task: Task, kwargs: dict[str, Any]) -> str:
    iteration = kwargs.get("iteration")
    name = task.name.rpartition(".")[2]
    return f"{name} {iteration}" if isinstance(iteration, int) else name
